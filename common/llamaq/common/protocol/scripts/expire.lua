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
--         'none'   nothing is due, or the job has ended or does not exist

local job = KEYS[1]
local state = redis.pcall('HMGET', job,
  'status', 'priority', 'entry', 'started_ms', 'queue_deadline_ms', 'deadline_ms', 'attempt', 'started_attempt')
local due = not state.err and is_open(state[1]) and due_ms(
  has_run_in_worker(state[1], state[7], state[8]) and 'running' or 'queued', state[4], state[5], state[6])
if due then
  allow_writes_when_full(job) -- the end of a job frees memory
end
set_due(job, due)
if not due or now_ms() < due then
  local had_none = not state.err and is_open(state[1]) and not state[3]
  local partition, id = string.match(job, '^(.*:)job:([^:]+)$')
  return had_none and give_entry(partition, id, now_ms()) and 'given' or 'none'
end
local stream = state[2] == 'bulk' and KEYS[4] or KEYS[3]
end_without_worker(job, KEYS[2], ARGV[2], stream, ARGV[1], state[3], 'deadline')
return 'ended'
