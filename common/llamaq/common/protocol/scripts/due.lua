-- Gives the jobs that are due their entries, and finds the jobs whose deadline has passed.
--
-- The hashes of the jobs and the job streams are not in KEYS: they follow from the ids. All of them have the hash tag of
-- the partition.
--
-- KEYS[1]  deadlines  sorted set of job ids by the time at which the jobs must end
-- KEYS[2]  later      sorted set of job ids without an entry, by the time at which the jobs are due
-- ARGV[1]  count      number of jobs at most, of each kind
--
-- Returns the time of the server in ms since the epoch, the number of jobs that have their entry now, and then the ids of
-- jobs whose deadline has passed, the earliest first.

local deadlines, later, count, now = KEYS[1], KEYS[2], ARGV[1], now_ms()
local partition, n_given = string.match(later, '^(.*:)later$'), 0
for _, id in ipairs(redis.call('ZRANGEBYSCORE', later, '-inf', now, 'LIMIT', 0, count)) do
  if give_entry(partition, id, now) then
    n_given = n_given + 1
  end
end
return {now, n_given, unpack(redis.call('ZRANGEBYSCORE', deadlines, '-inf', now, 'LIMIT', 0, count))}
