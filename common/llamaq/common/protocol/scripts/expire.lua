-- Ends a job that has reached its `deadline_s`, or waited for its `queue_timeout_s`. Workers call this script for every
-- due job of their queue, and a client for a job that it waits for.
--
-- KEYS[1]  job          hash of the job
-- KEYS[2]  events       stream of the job's events
-- KEYS[3]  interactive  job stream of priority 'interactive'
-- KEYS[4]  bulk         job stream of priority 'bulk'
-- ARGV[1]  group        consumer group of the job streams
-- ARGV[2]  channel      channel of the job's events
--
-- Returns 1  the job has ended here
--         0  the job is not due, has ended, or does not exist

local job = KEYS[1]
local state = redis.pcall('HMGET', job,
  'status', 'priority', 'entry', 'started_ms', 'queue_deadline_ms', 'deadline_ms')
local due = not state.err and is_open(state[1]) and due_ms(state[1], state[4], state[5], state[6])
if due then
  allow_writes_when_full(job) -- the end of a job frees memory
end
set_due(job, due)
if not due or now_ms() < due then
  return 0
end
local stream = state[2] == 'bulk' and KEYS[4] or KEYS[3]
end_without_worker(job, KEYS[2], ARGV[2], stream, ARGV[1], state[3], 'deadline')
return 1
