-- Returns the age of a worker's last heartbeat in ms, by the clock that `store_beat.lua` has read. On a cluster, the clocks of
-- the nodes differ.
--
-- KEYS[1]  workers  sorted set of workers, by the time of the last heartbeat
-- ARGV[1]  worker   id of the worker
--
-- The age is 0 if the heartbeat comes later than now: the clock was set back. It is the time since the epoch if there is no
-- heartbeat.

local now = now_ms()
local beat_ms = tonumber(redis.call('ZSCORE', KEYS[1], ARGV[1]) or '0')
return now - math.max(0, math.min(beat_ms, now)) -- another client may have written an infinite time
