-- Ends a job that has reached its `deadline_s` or has waited for its `queue_timeout_s`, or gives a delayed job that is
-- due its entry. Workers call this script for every job of their queue whose deadline has passed. A client calls it for
-- a job that it waits for.
--
-- KEYS[1]  job          hash of the job
-- KEYS[2]  events       stream of the job's events
-- KEYS[3]  interactive  job stream of priority 'interactive'
-- KEYS[4]  bulk         job stream of priority 'bulk'
-- ARGV[1]  group        consumer group of the job streams
-- ARGV[2]  channel      channel of the job's events
--
-- Returns 'ended'  the job has ended here
--         'given'  the job has its entry now
--         'none'   neither time has come, or the job has ended or does not exist

local job, events, interactive, bulk = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local group, channel = ARGV[1], ARGV[2]
local status, priority, entry, started_ms, queue_deadline_ms, deadline_ms, attempt, started_attempt =
  fields_if_hash(job,
    'status', 'priority', 'entry', 'started_ms', 'queue_deadline_ms', 'deadline_ms', 'attempt', 'started_attempt')
local deadline = nil
if is_open(status) then
  local is_in_worker = has_run_in_worker(status, attempt, started_attempt)
  deadline = next_deadline_ms(is_in_worker and 'running' or 'queued', started_ms, queue_deadline_ms, deadline_ms)
end
if deadline then
  allow_writes_when_full(job) -- the end of a job frees memory
end
set_next_deadline(job, deadline)
if not deadline or now_ms() < deadline then
  local partition, id = parts_of_job(job)
  local is_given = is_open(status) and not entry and give_entry(partition, id, now_ms())
  return is_given and 'given' or 'none'
end
local stream = priority == 'bulk' and bulk or interactive
end_without_worker(job, events, channel, stream, group, entry, 'deadline')
return 'ended'
