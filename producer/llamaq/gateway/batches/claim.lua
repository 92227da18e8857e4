-- Makes a server the runner of a batch, or renews its lease. Only the runner of a batch writes to it.
--
-- KEYS[1]  hash      the batch
-- ARGV[1]  text      id of the runner
-- ARGV[2]  integer   ms until the lease ends; 0 releases the batch
--
-- Returns {code, status, end of the lease in ms since the epoch}. The code is `mine`, `held` by another runner, `ended`
-- or `missing`. `starts` counts runners that began and stored nothing, because a batch may be the reason why they ended.
--
-- A lease that ends later than if it was renewed just now was stored before the clock was set back. It is shortened to
-- that time, so that its runner can renew it, and a dead runner does not keep the batch.
local LONGEST_MS = 3600000 -- longest lease of the settings; runners of earlier versions do not store `granted_ms`

local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local status, runner, lease, granted = unpack(redis.call('HMGET', KEYS[1], 'status', 'runner', 'lease_ms', 'granted_ms'))
if not status then
  return {'missing', '', 0}
end
if status == 'completed' or status == 'failed' or status == 'expired' or status == 'cancelled' then
  return {'ended', status, 0}
end
if runner and runner ~= ARGV[1] and tonumber(lease) > now then
  local latest = now + (tonumber(granted or '') or LONGEST_MS)
  if tonumber(lease) > latest then
    lease = latest
    redis.call('HSET', KEYS[1], 'lease_ms', lease)
  end
  return {'held', status, tonumber(lease)}
end
local until_ms = now + tonumber(ARGV[2])
if runner ~= ARGV[1] then
  redis.call('HINCRBY', KEYS[1], 'starts', 1)
end
redis.call('HSET', KEYS[1], 'runner', ARGV[1], 'lease_ms', until_ms, 'granted_ms', ARGV[2])
if ARGV[2] == '0' then
  redis.call('HSET', KEYS[1], 'runner', '', 'lease_ms', 0, 'starts', 0)
  redis.call('HDEL', KEYS[1], 'granted_ms') -- the next runner may be of an earlier version
end
return {'mine', status, until_ms}
