-- Takes a dead letter out. The job that it names lives on as long as any job that has ended, and no longer.
--
-- KEYS[1] dead   stream of dead letters
-- KEYS[2] job    hash      KEYS[3] events   stream of its events; both left out where it names no job
-- ARGV[1] its entry in the dead stream
--
-- Returns 1 | 0 there was no such entry

if redis.call('XDEL', KEYS[1], ARGV[1]) == 0 then
  return 0
end
if not KEYS[2] then
  return 1
end
local state = redis.call('HMGET', KEYS[2], 'finished_ms', 'ttl_ms')
if state[1] and state[2] then
  local left = math.max(1, state[1] + state[2] - now_ms())
  redis.call('PEXPIRE', KEYS[2], left)
  redis.call('PEXPIRE', KEYS[3], left)
end
return 1
