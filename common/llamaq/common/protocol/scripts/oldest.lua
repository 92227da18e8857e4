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

-- Returns the id and the fields of the first entry of a stream that belongs to no running job. Returns nil if there is none.
local function first_waiting(stream)
  local first = '-'
  while true do
    local entries = redis.pcall('XRANGE', stream, first, '+', 'COUNT', PAGE)
    if entries.err or #entries == 0 then
      return nil
    end
    local first_id, last_id, running = entries[1][1], entries[#entries][1], {}
    for _, pending in ipairs(redis.pcall('XPENDING', stream, group, first_id, last_id, PAGE)) do
      local entry, consumer, idle_ms = unpack(pending)
      running[entry] = consumer ~= WAITING and idle_ms < EXPIRED_IDLE_MS
    end
    for _, item in ipairs(entries) do
      local entry, fields = unpack(item)
      if not running[entry] then
        return entry, fields
      end
    end
    first = '(' .. last_id
  end
end

-- Returns the time from which the job of an entry waits. An entry without a job, or with a damaged job, waits from the
-- time of its id.
local function waits_from(stream, entry, fields)
  local _, id = unpack(fields)
  local waits_from_ms, submitted_ms = fields_if_hash(job_key(stream, tostring(id)), 'waits_from_ms', 'submitted_ms')
  return tonumber(waits_from_ms or '') or tonumber(submitted_ms or '') or tonumber(string.match(entry, '^%d+'))
end

local _, first_due = unpack(redis.call('ZRANGEBYSCORE', later, '-inf', now, 'WITHSCORES', 'LIMIT', 0, 1))
local oldest = tonumber(first_due or '') or math.huge
for i = 2, #KEYS do
  local stream = KEYS[i]
  local entry, fields = first_waiting(stream)
  if entry then
    oldest = math.min(oldest, waits_from(stream, entry, fields))
  end
end
return oldest == math.huge and -1 or math.max(0, now - oldest)
