-- Returns the ids of jobs whose deadline has passed, the earliest first.
--
-- KEYS[1]  deadlines  sorted set of job ids by the time at which the jobs are due
-- ARGV[1]  count      number of ids to return at most

return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now_ms(), 'LIMIT', 0, ARGV[1])
