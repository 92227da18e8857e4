-- Removes workers from the list of workers, except those that have sent a heartbeat lately, for example since the caller read
-- the list.
--
-- KEYS[1]  workers    sorted set of workers, by their last heartbeat
-- ARGV[1]  silent_ms  a worker whose last heartbeat is younger is kept. The time is in ms
-- ARGV[2]  worker     id of a worker; more follow

local since_ms = now_ms() - tonumber(ARGV[1])
for place = 2, #ARGV do
  local beat_ms = redis.call('ZSCORE', KEYS[1], ARGV[place])
  if beat_ms and tonumber(beat_ms) <= since_ms then
    redis.call('ZREM', KEYS[1], ARGV[place])
  end
end
