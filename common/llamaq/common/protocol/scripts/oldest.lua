-- Finds the waiting job of one partition that has waited longest.
--
-- The search skips the running jobs at the beginning of each stream. Their number is bounded by the slots of the
-- workers, so the time of the search does not depend on the number of waiting jobs.
--
-- The hashes of the jobs are not in KEYS: the entries name the jobs. All keys have the hash tag of the stream.
--
-- KEYS[1]   later    sorted set of the jobs that had no entry so far, by the time at which they are due
-- KEYS[2..] streams  job streams of the partition
-- ARGV[1]   group    consumer group of the job streams
--
-- Returns for how many ms the job has waited: since its submit, or since it was due. -1: no job waits.

local later, group, now = KEYS[1], ARGV[1], now_ms()
local PAGE = 100

-- Returns the first entry of a stream that belongs to no running job. Returns nil if there is none.
local function first_waiting(stream)
  local first = '-'
  while true do
    local entries = redis.pcall('XRANGE', stream, first, '+', 'COUNT', PAGE)
    if entries.err or #entries == 0 then
      return nil
    end
    local last, running = entries[#entries][1], {}
    for _, pending in ipairs(redis.pcall('XPENDING', stream, group, entries[1][1], last, PAGE)) do
      running[pending[1]] = pending[2] ~= WAITING and pending[3] < EXPIRED_IDLE_MS
    end
    for _, entry in ipairs(entries) do
      if not running[entry[1]] then
        return entry
      end
    end
    first = '(' .. last
  end
end

-- Returns the time from which the job of an entry waits. An entry without a job, or with a damaged job, waits from the
-- time of its id.
local function waits_from(stream, entry)
  local job = string.match(stream, '^(.*:)jobs:') .. 'job:' .. tostring(entry[2][2])
  local times = redis.pcall('HMGET', job, 'waits_from_ms', 'submitted_ms')
  return tonumber(times[1] or '') or tonumber(times[2] or '') or tonumber(string.match(entry[1], '^%d+'))
end

local oldest = tonumber(redis.call('ZRANGEBYSCORE', later, '-inf', now, 'WITHSCORES', 'LIMIT', 0, 1)[2]) or math.huge
for i = 2, #KEYS do
  local entry = first_waiting(KEYS[i])
  if entry then
    oldest = math.min(oldest, waits_from(KEYS[i], entry))
  end
end
return oldest == math.huge and -1 or math.max(0, now - oldest)
