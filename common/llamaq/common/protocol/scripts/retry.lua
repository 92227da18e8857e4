-- Schedules a retry of a job whose attempt failed temporarily. All tokens of the attempt are stored already, and the next
-- attempt continues after them. The attempt number rises, so that the worker can no longer write. Clients that wait
-- for the job receive the event `retried`, and read from the job when it is due.
--
-- KEYS[1]  job       hash of the job
-- KEYS[2]  events    stream of the job's events
-- KEYS[3]  stream    job stream that the job was claimed from
-- ARGV[1]  attempt   number of the worker's attempt
-- ARGV[2]  worker    id of the worker
-- ARGV[3]  group     consumer group of the job stream
-- ARGV[4]  entry     id of the job's entry
-- ARGV[5]  channel   channel of the job's events
-- ARGV[6]  error     msgpack of the event `failed` that the failure would be without retries
-- ARGV[7]  first_ms  delay of the first retry, in ms. Each retry doubles it
-- ARGV[8]  max_ms    upper bound on the delay, in ms
-- ARGV[9]  share     share of the delay that is used, from 0.5 to 1, so that jobs which failed together do not return
--                    together
--
-- Returns the delay in ms. -1: the job was cancelled and has ended here. -2: a newer attempt exists, or the job has ended,
-- or has no retry left

local job, stream, group, entry = KEYS[1], KEYS[3], ARGV[3], ARGV[4]
local state = redis.call('HMGET', job,
  'status', 'attempt', 'generated', 'generated_at_start', 'worker', 'at_risk', 'retries_left', 'cancel', 'started_ms',
  'queue_deadline_ms', 'deadline_ms', 'tenant')
if not is_open(state[1]) or state[2] ~= ARGV[1] or state[5] ~= ARGV[2] or tonumber(state[7] or '0') <= 0 then
  remove_death(job, ARGV[1], ARGV[2])
  return -2
end
if state[8] then
  end_without_worker(job, KEYS[2], ARGV[5], stream, group, entry, 'cancelled')
  return -1
end
allow_writes_when_full(job) -- the retry itself would free no memory, but the job must not be lost
requeue_job(job, state, false)
count_events(job, 'retries', 1)
local retried = redis.call('HINCRBY', job, 'retried', 1)
redis.call('HINCRBY', job, 'retries_left', -1)
local delay = math.floor(math.min(tonumber(ARGV[7]) * 2 ^ math.min(retried - 1, 40), tonumber(ARGV[8])) * ARGV[9])
redis.call('HSET', job, 'retry_error', ARGV[6])
redis.call('HDEL', job, 'entry')
leave_turns(stream, state[12], entry)
drop_entry(stream, group, entry)
local run_at = now_ms() + delay
set_later(job, run_at)
set_due(job, due_ms('queued', state[9], state[10], state[11]))
local failed = cmsgpack.unpack(ARGV[6])
redis.call('PUBLISH', ARGV[5], cmsgpack.pack(
  {type = 'retried', run_at_ms = run_at, code = failed.code, message = failed.message}))
return delay
