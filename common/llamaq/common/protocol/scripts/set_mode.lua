-- Sets the mode of one partition of a queue. This works also when Redis is full.
--
-- When the queue is paused, jobs that workers have claimed and that had no slot so far are requeued: the attempt number
-- rises, so the worker drops the job at its next flush.
--
-- The hashes of the jobs are not in KEYS: the entries name the jobs. All keys have the hash tag of the partition.
--
-- KEYS[1]   config   hash with the settings of the partition
-- KEYS[2..] streams  job streams of the partition
-- ARGV[1]   mode     'paused' | 'draining' | '': open
-- ARGV[2]   group    consumer group of the job streams
-- ARGV[3]   count    number of waiting entries of each stream to examine at most
--
-- Returns the number of requeued jobs.

local config, mode, group, count = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
allow_writes_when_full(config)
if mode == '' then
  redis.call('HDEL', config, 'mode')
else
  redis.call('HSET', config, 'mode', mode)
end

-- Requeues the job of an entry if it waits for its first slot in a worker. Returns whether the job was requeued.
local function release(stream, entry)
  local id = job_id_in(fields_of_entry(stream, entry))
  if not id then
    return false
  end
  local job = job_key(stream, id)
  local status, worker, started_ms = fields_if_hash(job, 'status', 'worker', 'started_ms')
  if status ~= 'queued' or not worker or started_ms then
    return false
  end
  requeue_job(job)
  requeue_entry(stream, group, entry)
  return true
end

local n_released = 0
for i = 2, mode == 'paused' and #KEYS or 0 do
  n_released = n_released + release_entries(KEYS[i], group, WAITING, count, release)
end
return n_released
