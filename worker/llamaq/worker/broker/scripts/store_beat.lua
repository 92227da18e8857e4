-- Stores when a worker, or a worker of a queue, has sent its last heartbeat, even when Redis has reached `maxmemory`.
--
-- KEYS[1]  beats   sorted set of the workers or of the queues, by the time of the last heartbeat
-- ARGV[1]  member  id of the worker, or name of the queue
-- ARGV[2]  now_ms  time of the server
--
-- Returns 1 if the member is new, otherwise 0.

allow_writes_when_full(KEYS[1])
return redis.call('ZADD', KEYS[1], ARGV[2], ARGV[1])
