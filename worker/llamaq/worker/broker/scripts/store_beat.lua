-- Stores when a worker, or a worker of a queue, has sent its last heartbeat, even when Redis has reached `maxmemory`. The time
-- is that of the server with the key, because the age of the heartbeat is measured there.
--
-- KEYS[1]  beats   sorted set of the workers or of the queues, by the time of the last heartbeat, in ms since the epoch
-- ARGV[1]  member  id of the worker, or name of the queue
--
-- Returns 1 if the member is new, otherwise 0.

allow_writes_when_full(KEYS[1])
return redis.call('ZADD', KEYS[1], now_ms(), ARGV[1])
