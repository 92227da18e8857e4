-- Requeues all jobs of a worker that is known to be dead, and removes the worker from the consumer groups of one partition.
-- Other workers take the jobs at once, without waiting until their leases expire. This works also when Redis is full.
--
-- The hashes of the jobs are not in KEYS: they follow from the entries. All of them have the hash tag of the partition.
--
-- KEYS[..]  streams      job streams of the partition
-- ARGV[1]   group        consumer group of the job streams
-- ARGV[2]   worker       id of the dead worker
-- ARGV[3]   max_waiting  number of waiting entries that are searched for jobs which the worker had claimed
--
-- Returns the number of requeued jobs.

local group, worker = ARGV[1], ARGV[2]

-- Requeues the job of an entry if the dead worker holds it. Returns whether the job was requeued.
local function release(stream, entry)
  local found = redis.call('XRANGE', stream, entry, entry)[1]
  local id = found and found[2][1] == 'id' and found[2][2]
  if not id then
    return false
  end
  local job = string.match(stream, '^(.*:)jobs:') .. 'job:' .. id
  local state = redis.pcall('HMGET', job, 'status', 'attempt', 'generated', 'generated_at_start', 'worker', 'at_risk')
  if state.err or not is_open(state[1]) or state[5] ~= worker then
    return false
  end
  allow_writes_when_full(job)
  requeue_job(job, state, true)
  requeue_entry(stream, group, entry)
  return true
end

local n_released = 0
for _, stream in ipairs(KEYS) do
  for consumer, limit in pairs({[worker] = 10000, [WAITING] = tonumber(ARGV[3])}) do
    local pending = redis.pcall('XPENDING', stream, group, '-', '+', limit, consumer)
    for _, item in ipairs(pending.err and {} or pending) do
      if item[3] < REQUEUED_IDLE_MS / 2 and release(stream, item[1]) then -- otherwise the entry is requeued already
        n_released = n_released + 1
      end
    end
  end
  requeue_entries(stream, group, worker)
  redis.pcall('XGROUP', 'DELCONSUMER', stream, group, worker)
end
return n_released
