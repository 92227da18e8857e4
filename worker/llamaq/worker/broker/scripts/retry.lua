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
-- ARGV[6]  failed    msgpack of the event `failed` that the failure would be without retries
-- ARGV[7]  first_ms  delay of the first retry, in ms. Each retry doubles it
-- ARGV[8]  max_ms    upper bound on the delay, in ms
-- ARGV[9]  share     share of the delay that is used, from 0.5 to 1, so that jobs which failed together do not return
--                    together
--
-- Returns the delay in ms. -1: the job was cancelled and has ended here. -2: a newer attempt exists, or the job has ended,
-- or has no retry left

local job, events, stream = KEYS[1], KEYS[2], KEYS[3]
local attempt, worker, group, entry, channel, failed, first_ms, max_ms, share = unpack(ARGV)
local status, newest, last_worker, retries_left, cancel, started_ms, queue_deadline_ms, deadline_ms, tenant =
  unpack(redis.call('HMGET', job,
    'status', 'attempt', 'worker', 'retries_left', 'cancel', 'started_ms', 'queue_deadline_ms', 'deadline_ms', 'tenant'))
if not is_open(status) or not is_newest_attempt(newest, last_worker, attempt, worker)
  or tonumber(retries_left or '0') <= 0 then
  remove_death(job, attempt, worker)
  return -2
end
if cancel then
  end_without_worker(job, events, channel, stream, group, entry, 'cancelled')
  return -1
end
allow_writes_when_full(job) -- the retry itself would free no memory, but the job must not be lost
requeue_job(job)
count_events(job, 'retries', 1)
local retried = redis.call('HINCRBY', job, 'retried', 1)
redis.call('HINCRBY', job, 'retries_left', -1)
local doubled_ms = first_ms * 2 ^ math.min(retried - 1, 40)
local delay = math.floor(math.min(doubled_ms, tonumber(max_ms)) * share)
redis.call('HSET', job, 'retry_error', failed)
redis.call('HDEL', job, 'entry')
leave_turns(stream, tenant, entry)
drop_entry(stream, group, entry)
local run_at = now_ms() + delay
set_later(job, run_at)
set_next_deadline(job, next_deadline_ms('queued', started_ms, queue_deadline_ms, deadline_ms))
local event = cmsgpack.unpack(failed)
redis.call('PUBLISH', channel, cmsgpack.pack(
  {type = 'retried', run_at_ms = run_at, code = event.code, message = event.message}))
return delay
