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
--         'running'  the job has a slot, its worker will end it because of a cancel, or the queue is paused and a worker
--                    may continue the job after an interruption. Its priority is not changed
--         'changed'  the job has the new priority, perhaps since earlier

local job, stream, other = KEYS[1], KEYS[2], KEYS[3]
local id, new_priority, group = ARGV[1], ARGV[2], ARGV[3]
local status, priority, old_entry, tenant, worker, cancel, started_ms = unpack(redis.call('HMGET', job,
  'status', 'priority', 'entry', 'tenant', 'worker', 'cancel', 'started_ms'))
if not status then
  return 'gone'
end
if has_ended(status) then
  return 'done'
end
if status ~= 'queued' or cancel then
  return 'running'
end
if priority == new_priority then
  return 'changed'
end
-- A worker may continue this job although the queue is paused. It would not read a new entry.
if started_ms and old_entry and is_paused(job) and for_one_job(is_pending, other, group, old_entry) == true then
  return 'running'
end
allow_writes_when_full(job)
if old_entry then -- otherwise the job is not due, and gets its entry later
  local entry, entry_tenant = add_entry(stream, id, tenant)
  if type(entry) == 'table' then
    return entry -- another client has overwritten the stream
  end
  leave_turns(other, tenant, old_entry)
  drop_entry(other, group, old_entry)
  set_entry(job, entry, entry_tenant)
end
redis.call('HSET', job, 'priority', new_priority)
if worker then
  requeue_job(job)
end
return 'changed'
