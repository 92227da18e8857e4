-- Reads new entries of job streams and gives each a lease, so that no entry is left without one if the worker dies. The
-- streams of a paused queue are not read.
--
-- KEYS[..]  streams   job streams
-- ARGV[1]   group     consumer group of the job streams
-- ARGV[2]   count     number of entries to read from each stream at most
-- ARGV[3]   lease_ms  how long the worker keeps an entry without a renewal, in ms
--
-- Returns an array with {stream, entries} for each stream that has new entries. `entries` is an array with
-- {id, {name, value, ...}} for each entry.

local command, ids = {'XREADGROUP', 'GROUP', ARGV[1], WAITING, 'COUNT', ARGV[2], 'STREAMS'}, {}
for _, stream in ipairs(KEYS) do
  if not is_paused(stream) then
    command[#command + 1] = stream
    ids[#ids + 1] = '>'
  end
end
if #ids == 0 then
  return {}
end
for _, id in ipairs(ids) do
  command[#command + 1] = id
end
local found = redis.call(unpack(command))
if not found then
  return {}
end
for _, reply in ipairs(found) do
  for _, entry in ipairs(reply[2]) do
    renew_lease(reply[1], ARGV[1], WAITING, entry[1], ARGV[3])
  end
end
return found
