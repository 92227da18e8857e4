-- Cancels a job. A waiting job ends at once. A job whose worker has lost its lease also ends at once. A running job is
-- marked, and its worker ends it after the next flush. A preempted job is marked too, because the worker in which it
-- waits has its output. This works also when Redis is full.
--
-- KEYS[1]  job          hash of the job
-- KEYS[2]  events       stream of the job's events
-- KEYS[3]  interactive  job stream of priority 'interactive'
-- KEYS[4]  bulk         job stream of priority 'bulk'
-- ARGV[1]  group        consumer group of the job streams
-- ARGV[2]  channel      channel of the job's events
-- ARGV[3]  waiting only '1' if a running job is left alone
--
-- Returns 'gone'       the job does not exist
--         'done'       the job has already ended
--         'cancelled'  the job waited, and has ended now
--         'requested'  the job runs or was preempted, and is marked
--         'running'    the job runs, and is left alone

local job, events = KEYS[1], KEYS[2]
local state = redis.call('HMGET', job, 'status', 'priority', 'entry', 'attempt', 'started_attempt')
if not state[1] then
  return 'gone'
end
if has_ended(state[1]) then
  return 'done'
end
local stream = state[2] == 'bulk' and KEYS[4] or KEYS[3]

-- Returns whether a worker has a lease of the entry. A worker without a lease has died, or was paused. The next call of
-- a paused worker for the job returns 'lost'.
local function is_leased(entry)
  local pending = entry and redis.pcall('XPENDING', stream, ARGV[1], entry, entry, 1)
  return pending and not pending.err and pending[1] and pending[1][3] < EXPIRED_IDLE_MS
end

local is_in_worker = has_run_in_worker(state[1], state[4], state[5]) and is_leased(state[3])
if is_in_worker and state[1] == 'running' and ARGV[3] == '1' then
  return 'running'
end
allow_writes_when_full(job)
redis.call('HSET', job, 'cancel', 1)
if is_in_worker then
  return 'requested'
end
end_without_worker(job, events, ARGV[2], stream, ARGV[1], state[3], 'cancelled')
return 'cancelled'
