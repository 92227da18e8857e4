-- Changes the priority of a job that has no slot: its entry moves to the end of the other job stream. This works also when
-- Redis is full. A worker that has claimed the job drops it at its next flush, because the attempt number rises.
--
-- KEYS[1]  job       hash of the job
-- KEYS[2]  stream    job stream of the new priority
-- KEYS[3]  other     job stream of the other priority
-- ARGV[1]  id        id of the job
-- ARGV[2]  priority  the new priority
-- ARGV[3]  group     consumer group of the job streams
--
-- Returns 'gone'     the job does not exist
--         'done'     the job has ended
--         'running'  the job has a slot; its priority is not changed
--         'changed'  the job has the new priority, perhaps since earlier

local job, stream, other = KEYS[1], KEYS[2], KEYS[3]
local state = redis.call('HMGET', job,
  'status', 'attempt', 'generated', 'generated_at_start', 'worker', 'at_risk', 'priority', 'entry', 'tenant')
if not state[1] then
  return 'gone'
end
if has_ended(state[1]) then
  return 'done'
end
if state[1] ~= 'queued' then
  return 'running'
end
if state[7] == ARGV[2] then
  return 'changed'
end
allow_writes_when_full(job)
if state[8] then -- otherwise the job is not due, and gets its entry later
  local entry, tenant = add_entry(stream, ARGV[1], state[9])
  if type(entry) == 'table' then
    return entry -- another client has overwritten the stream
  end
  leave_turns(other, state[9], state[8])
  drop_entry(other, ARGV[3], state[8])
  set_entry(job, entry, tenant)
end
redis.call('HSET', job, 'priority', ARGV[2])
if state[5] then
  requeue_job(job, state, false)
end
return 'changed'
