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
-- ARGV[3]  only_waiting '1': a running job is left alone; '0': it is marked
--
-- Returns 'gone'       the job does not exist
--         'done'       the job has already ended
--         'cancelled'  the job waited, and has ended now
--         'requested'  the job runs or was preempted, and is marked
--         'running'    the job runs, and is left alone

local job, events, interactive, bulk = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local group, channel, only_waiting = ARGV[1], ARGV[2], ARGV[3] == '1'
local status, priority, entry, attempt, started_attempt = unpack(redis.call('HMGET', job,
  'status', 'priority', 'entry', 'attempt', 'started_attempt'))
if not status then
  return 'gone'
end
if has_ended(status) then
  return 'done'
end
local stream = priority == 'bulk' and bulk or interactive

-- Returns whether a worker has a lease of the job's entry. A worker without a lease has died, or was paused. The next call
-- of a paused worker for the job returns 'lost'. The entry of a running job is WAITING's if another worker has reclaimed it.
local function is_leased()
  local pending = entry and redis.pcall('XPENDING', stream, group, entry, entry, 1)
  if not pending or pending.err or not pending[1] then
    return false
  end
  local _, consumer, idle_ms = unpack(pending[1])
  return idle_ms < EXPIRED_IDLE_MS and (status ~= 'running' or consumer ~= WAITING)
end

local is_in_worker = has_run_in_worker(status, attempt, started_attempt) and is_leased()
if is_in_worker and status == 'running' and only_waiting then
  return 'running'
end
allow_writes_when_full(job)
redis.call('HSET', job, 'cancel', 1)
if is_in_worker then
  return 'requested'
end
end_without_worker(job, events, channel, stream, group, entry, 'cancelled')
return 'cancelled'
