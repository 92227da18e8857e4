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

local config, mode, group = KEYS[1], ARGV[1], ARGV[2]
allow_writes_when_full(config)
if mode == '' then
  redis.call('HDEL', config, 'mode')
else
  redis.call('HSET', config, 'mode', mode)
end

-- Requeues the job of an entry if it waits for its first slot in a worker. Returns whether the job was requeued.
local function release(stream, entry)
  local fields = (redis.call('XRANGE', stream, entry, entry)[1] or {})[2] or {}
  local job = fields[1] == 'id' and string.match(stream, '^(.*:)jobs:') .. 'job:' .. fields[2]
  local state = job and redis.pcall('HMGET', job,
    'status', 'attempt', 'generated', 'generated_at_start', 'worker', 'at_risk', 'started_ms')
  if not state or state.err or state[1] ~= 'queued' or not state[5] or state[7] then
    return false
  end
  requeue_job(job, state, false)
  requeue_entry(stream, group, entry)
  return true
end

local n_released = 0
for i = 2, mode == 'paused' and #KEYS or 0 do
  local pending = redis.pcall('XPENDING', KEYS[i], group, '-', '+', ARGV[3], WAITING)
  for _, item in ipairs(pending.err and {} or pending) do
    if item[3] < REQUEUED_IDLE_MS / 2 and release(KEYS[i], item[1]) then -- otherwise the entry is requeued already
      n_released = n_released + 1
    end
  end
end
return n_released
