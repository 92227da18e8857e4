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
local idle_ms = now_ms() <= tonumber(ARGV[4]) and EXPIRED_IDLE_MS or REQUEUED_IDLE_MS / 2
local count, paused, taken = tonumber(ARGV[2]), is_paused(stream), {}
local MAX_EXAMINED = 1000 -- while the queue is paused

-- Returns whether the job of an entry has had a slot.
local function has_started(entry)
  local job = string.match(stream, '^(.*:)jobs:') .. 'job:' .. tostring(entry[2][2])
  return redis.pcall('HEXISTS', job, 'started_ms') == 1
end

local examined = paused and MAX_EXAMINED or count
for _, pending in ipairs(redis.call('XPENDING', stream, group, 'IDLE', idle_ms, '-', '+', examined)) do
  if #taken == count then
    break
  end
  local id = pending[1]
  local entry = redis.call('XRANGE', stream, id, id)[1]
  if not entry then
    redis.call('XACK', stream, group, id) -- another client deleted the entry and did not acknowledge it
  elseif not paused or has_started(entry) then
    renew_lease(stream, group, WAITING, id, ARGV[3])
    taken[#taken + 1] = entry
  end
end
return taken
