-- Returns the time of the server in ms since the epoch, and then the ids of jobs whose deadline has passed, the earliest
-- first.
--
-- KEYS[1]  deadlines  sorted set of job ids by the time at which the jobs are due
-- ARGV[1]  count      number of ids to return at most

local now = now_ms()
return {now, unpack(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[1]))}
