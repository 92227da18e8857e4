-- Stores the state of a worker, which expires if it is not stored again. Two commands would not do: if the connection
-- broke between them, the state would be stored without an expiry, and a dead worker would be listed for ever.
--
-- KEYS[1]  worker  hash of the worker
-- ARGV[1]  state   msgpack of a `Worker`
-- ARGV[2]  ttl_ms  time in ms after which the state expires
--
-- Returns 1.

allow_writes_when_full(KEYS[1]) -- a worker that runs jobs stays listed
redis.call('HSET', KEYS[1], 'worker', ARGV[1])
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
