-- Takes entries of one job stream that were requeued, or whose lease has expired. The length of a lease depends on the
-- worker that holds the entry, because it is stored with the entry (see `renew_lease` in _lib.lua).
--
-- While the queue is paused, only entries of jobs that had a slot are taken, so that interrupted streams continue. The
-- hashes of the jobs are not in KEYS: the entries name the jobs.
--
-- KEYS[1]  stream     job stream
-- ARGV[1]  group      consumer group of the job stream
-- ARGV[2]  count      number of entries to take at most
-- ARGV[3]  lease_ms   how long the caller keeps an entry without a renewal, in ms
-- ARGV[4]  trusted_ms time of the server in ms. Until then, entries whose lease looks expired are taken. Later, and if
--                     it is 0, only requeued entries are taken
--
-- Returns an array with {id, {name, value, ...}} for each entry.

local stream, group = KEYS[1], ARGV[1]
local count, lease_ms, trusted_ms = tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
local idle_ms = now_ms() <= trusted_ms and EXPIRED_IDLE_MS or REQUEUED_IDLE_MS / 2
local paused, taken = is_paused(stream), {}
local MAX_EXAMINED = 1000 -- while the queue is paused

-- Returns whether the job of the entry with these fields has had a slot.
local function has_started(fields)
  local _, id = unpack(fields)
  return redis.pcall('HEXISTS', job_key(stream, tostring(id)), 'started_ms') == 1
end

local examined = paused and MAX_EXAMINED or count
for _, pending in ipairs(redis.call('XPENDING', stream, group, 'IDLE', idle_ms, '-', '+', examined)) do
  if #taken == count then
    break
  end
  local entry = unpack(pending)
  local fields = fields_of_entry(stream, entry)
  if not fields then
    redis.call('XACK', stream, group, entry) -- another client deleted the entry and did not acknowledge it
  elseif not paused or has_started(fields) then
    renew_lease(stream, group, WAITING, entry, lease_ms)
    taken[#taken + 1] = {entry, fields}
  end
end
return taken
