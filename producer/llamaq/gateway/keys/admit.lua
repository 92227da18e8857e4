-- Counts a request of an API key, if the key has not reached a limit.
--
-- KEYS[1]  string       the time, in ms, at which the next request would be due if requests were evenly spaced
-- KEYS[2]  sorted set   ids of open requests, by the time in ms at which they no longer count
-- ARGV[1]  text         id of the request; a request that is open is renewed, and not counted again
-- ARGV[2]  integer      requests per minute; 0: no limit
-- ARGV[3]  integer      requests at the same time; 0: no limit
-- ARGV[4]  integer      ms that an open request counts
--
-- Returns 0 if the request was counted, else the ms after which the client may try again.
--
-- The rate is limited by the generic cell rate algorithm: each request moves the time of KEYS[1] on by the interval
-- between two evenly spaced requests, and this time may be at most a minute ahead. A time that is further ahead than this
-- script stores was stored before the clock was set back. It is corrected, so that the key is not refused until then.
local MINUTE_MS = 60000
local RETRY_MS = 1000

local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local rate, most = tonumber(ARGV[2]), tonumber(ARGV[3])

redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
local latest = now + tonumber(ARGV[4])
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. latest, '+inf')) do
  redis.call('ZADD', KEYS[2], latest, id)
end
local is_open = redis.call('ZSCORE', KEYS[2], ARGV[1])
if not is_open then
  if most > 0 and redis.call('ZCARD', KEYS[2]) >= most then
    return RETRY_MS
  end
  if rate > 0 then
    local stored = tonumber(redis.call('GET', KEYS[1]) or '0')
    local due = (stored > now + MINUTE_MS and now or math.max(stored, now)) + MINUTE_MS / rate
    if due - now > MINUTE_MS then
      return math.ceil(due - now - MINUTE_MS)
    end
    redis.call('SET', KEYS[1], string.format('%.3f', due), 'PX', MINUTE_MS)
  end
end
redis.call('ZADD', KEYS[2], latest, ARGV[1])
redis.call('PEXPIRE', KEYS[2], ARGV[4])
return 0
