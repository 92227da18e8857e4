-- Deletes a dead letter. The keys of its job then expire after the usual time to live of a job.
--
-- KEYS[1]  dead    stream of dead letters
-- KEYS[2]  job     hash of the job; absent if the dead letter names no job
-- KEYS[3]  events  stream of the job's events; absent if the dead letter names no job
-- ARGV[1]  entry   id of the dead letter in the stream
--
-- Returns 1  the dead letter was deleted
--         0  there was no such dead letter

local dead, job, events = KEYS[1], KEYS[2], KEYS[3]
local entry = ARGV[1]
if redis.call('XDEL', dead, entry) == 0 then
  return 0
end
if not job then
  return 1
end
local finished_ms, ttl_ms = unpack(redis.call('HMGET', job, 'finished_ms', 'ttl_ms'))
if finished_ms and ttl_ms then
  local left = math.max(1, (whole_number(finished_ms) or 0) + (whole_number(ttl_ms) or 0) - now_ms())
  redis.call('PEXPIRE', job, left)
  redis.call('PEXPIRE', events, left)
end
return 1
