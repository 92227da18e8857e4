-- Removes workers from the list of workers, except those that have sent a heartbeat since the caller read the list.
--
-- KEYS[1]  workers   sorted set of workers, by their last heartbeat
-- ARGV[1]  since_ms  a worker with a later heartbeat is kept
-- ARGV[2]  worker    id of a worker; more follow

for place = 2, #ARGV do
  local beat_ms = redis.call('ZSCORE', KEYS[1], ARGV[place])
  if beat_ms and tonumber(beat_ms) <= tonumber(ARGV[1]) then
    redis.call('ZREM', KEYS[1], ARGV[place])
  end
end
