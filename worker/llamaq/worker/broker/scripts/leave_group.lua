-- Removes a worker from the consumer groups of one partition. Its pending entries are requeued in the same step, because
-- deleting a consumer would drop them.
--
-- KEYS[..]  streams  job streams of the partition
-- ARGV[1]   group    consumer group of the job streams
-- ARGV[2]   worker   id of the worker
--
-- Returns the number of requeued entries.

local group, worker = ARGV[1], ARGV[2]
local n_requeued = 0
for _, stream in ipairs(KEYS) do
  n_requeued = n_requeued + requeue_entries(stream, group, worker)
  redis.pcall('XGROUP', 'DELCONSUMER', stream, group, worker) -- the group may not exist, for example after FLUSHALL
end
return n_requeued
