-- Finds jobs of one partition that wait for a slot in other workers, so that a worker with a free slot can claim them.
--
-- While the queue is paused, only jobs that had a slot are found.
--
-- The hashes of the jobs are not in KEYS: the entries name the jobs. All keys have the hash tag of the partition.
--
-- KEYS[..]  streams      job streams of the partition, in the order of their priority
-- ARGV[1]   group        consumer group of the job streams
-- ARGV[2]   worker       id of the worker with a free slot
-- ARGV[3]   count        number of jobs to return at most
-- ARGV[4]   examined     number of waiting entries of each stream to examine at most
-- ARGV[5]   wait_ms      how long a job stays with its worker, to be multiplied by its `move_factor`
-- ARGV[6]   max_wait_ms  upper bound on this time
-- ARGV[7]   max_crashes  number of crashes with which a job fails
--
-- Returns an array with {stream, entry, job id, attempt} for each job.

local group, worker, count, wait_ms = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[5])
local now, prefix, found = now_ms(), string.match(KEYS[1], '^(.*:)jobs:') .. 'job:', {}
local paused = is_paused(KEYS[1])

-- Returns the id of the job of an entry, and its attempt. Returns nil if the job must stay where it is.
local function movable(stream, entry)
  local fields = (redis.call('XRANGE', stream, entry, entry)[1] or {})[2] or {}
  if fields[1] ~= 'id' then
    return nil
  end
  local state = redis.pcall('HMGET', prefix .. fields[2], 'status', 'worker', 'attempt', 'claimed_ms', 'crashes',
    'started_ms', 'move_factor')
  if state.err or state[1] ~= 'queued' or not state[2] or state[2] == worker or (paused and not state[6]) then
    return nil
  end
  local attempt, claimed, crashes = tonumber(state[3]), tonumber(state[4] or ''), tonumber(state[5] or '0')
  -- A suspect is not moved: `check_crash.lua` decides how it runs.
  if not attempt or not claimed or crashes > 0 and crashes + 1 >= tonumber(ARGV[7]) then
    return nil
  end
  if now - claimed < math.min(wait_ms * tonumber(state[7] or '1'), tonumber(ARGV[6])) then
    return nil
  end
  return fields[2], attempt
end

for _, stream in ipairs(KEYS) do
  for _, pending in ipairs(redis.call('XPENDING', stream, group, '-', '+', ARGV[4], WAITING)) do
    local id, attempt = movable(stream, pending[1])
    if id and #found < count then
      found[#found + 1] = {stream, pending[1], id, attempt}
    end
  end
end
return found
