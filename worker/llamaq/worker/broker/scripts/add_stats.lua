-- Adds ended jobs to the stats of a queue.
--
-- KEYS[1]  stats    stream of the queue's stats
-- ARGV[1]  max      number of entries that the stream keeps, about
-- ARGV[2]  entries  msgpack of an array with the msgpack of a `RecentJob` for each job
--
-- Returns the number of added entries.

local entries = cmsgpack.unpack(ARGV[2])
for _, job in ipairs(entries) do
  redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', 'job', job)
end
return #entries
