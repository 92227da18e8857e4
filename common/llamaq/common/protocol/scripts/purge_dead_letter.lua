-- Deletes a dead letter. The keys of its job then expire after the usual time to live of a job.
--
-- KEYS[1]  dead    stream of dead letters
-- KEYS[2]  job     hash of the job; absent if the dead letter names no job
-- KEYS[3]  events  stream of the job's events; absent if the dead letter names no job
-- ARGV[1]  entry   id of the dead letter in the stream
--
-- Returns 1  the dead letter was deleted
--         0  there was no such dead letter

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
