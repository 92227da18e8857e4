-- Requeues all jobs of a worker that is known to be dead, and removes the worker from the consumer groups of one partition.
-- Other workers take the jobs at once, without waiting until their leases expire. A job whose cancel was accepted ends
-- instead. This works also when Redis is full.
--
-- The keys of the jobs are not in KEYS: they follow from the entries. All of them have the hash tag of the partition.
--
-- KEYS[..]  streams      job streams of the partition
-- ARGV[1]   group        consumer group of the job streams
-- ARGV[2]   worker       id of the dead worker
-- ARGV[3]   max_waiting  number of waiting entries that are searched for jobs which the worker had claimed
--
-- Returns the number of jobs that were requeued or have ended here.

local group, worker, max_waiting = ARGV[1], ARGV[2], tonumber(ARGV[3])
local MAX_RUNNING = 10000 -- number of entries of running jobs that are searched

-- Requeues or ends the job of an entry if the dead worker holds it. Returns whether the worker held it.
local function release(stream, entry)
  local id = job_id_in(fields_of_entry(stream, entry))
  if not id then
    return false
  end
  local job = job_key(stream, id)
  local status, attempt, last_worker, cancel, at_risk, generated, generated_at_start = fields_if_hash(job,
    'status', 'attempt', 'worker', 'cancel', 'at_risk', 'generated', 'generated_at_start')
  if not is_open(status) or last_worker ~= worker then
    return false
  end
  if cancel and pcall(end_cancelled, job, stream, group, entry) then
    return true
  end
  allow_writes_when_full(job)
  if at_risk then
    record_crash(job, attempt, worker, is_unproven(generated, generated_at_start))
  end
  requeue_job(job)
  requeue_entry(stream, group, entry)
  return true
end

local n_released = 0
for _, stream in ipairs(KEYS) do
  for consumer, limit in pairs({[worker] = MAX_RUNNING, [WAITING] = max_waiting}) do
    n_released = n_released + release_entries(stream, group, consumer, limit, release)
  end
  requeue_entries(stream, group, worker)
  redis.pcall('XGROUP', 'DELCONSUMER', stream, group, worker)
end
return n_released
