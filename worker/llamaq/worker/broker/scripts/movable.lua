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

local group, worker, examined = ARGV[1], ARGV[2], ARGV[4]
local count, wait_ms, max_wait_ms = tonumber(ARGV[3]), tonumber(ARGV[5]), tonumber(ARGV[6])
local max_crashes = tonumber(ARGV[7])
local now, paused, found = now_ms(), is_paused(KEYS[1]), {}

-- Returns the id of the job of an entry, and its attempt. Returns nil if the job must stay where it is.
local function movable(stream, entry)
  local id = job_id_in(fields_of_entry(stream, entry))
  if not id then
    return nil
  end
  local status, last_worker, attempt, claimed_ms, crashes, started_ms, move_factor = fields_if_hash(job_key(stream, id),
    'status', 'worker', 'attempt', 'claimed_ms', 'crashes', 'started_ms', 'move_factor')
  if status ~= 'queued' or not last_worker or last_worker == worker or (paused and not started_ms) then
    return nil
  end
  attempt, claimed_ms, crashes = tonumber(attempt), tonumber(claimed_ms or ''), whole_number(crashes) or 0
  -- A suspect is not moved: `check_crash.lua` decides how it runs.
  if not attempt or not claimed_ms or crashes > 0 and crashes + 1 >= max_crashes then
    return nil
  end
  local waited_ms = now - claimed_ms -- below 0: the clock was set back
  if waited_ms >= 0 and waited_ms < math.min(wait_ms * (tonumber(move_factor or '') or 1), max_wait_ms) then
    return nil
  end
  return id, attempt
end

for _, stream in ipairs(KEYS) do
  for _, pending in ipairs(redis.call('XPENDING', stream, group, '-', '+', examined, WAITING)) do
    local entry = unpack(pending)
    local id, attempt = movable(stream, entry)
    if id and #found < count then
      found[#found + 1] = {stream, entry, id, attempt}
    end
  end
end
return found
