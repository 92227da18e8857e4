-- Gives the jobs that are due their entries, and finds the jobs whose deadline has passed.
--
-- The hashes of the jobs and the job streams are not in KEYS: they follow from the ids. All of them have the hash tag of
-- the partition.
--
-- KEYS[1]  deadlines  sorted set of job ids by the time at which the jobs must end
-- KEYS[2]  later      sorted set of job ids without an entry, by the time at which the jobs are due
-- ARGV[1]  count      number of jobs at most, of each kind
--
-- Returns the time of the server in ms since the epoch, the number of jobs that have their entry now, the number of jobs
-- that have not ended, and then the ids of jobs whose deadline has passed, the earliest first.

local deadlines, later, count, now = KEYS[1], KEYS[2], ARGV[1], now_ms()
local partition, n_given = string.match(later, '^(.*:)later$'), 0
for _, id in ipairs(redis.call('ZRANGEBYSCORE', later, '-inf', now, 'LIMIT', 0, count)) do
  if give_entry(partition, id, now) then
    n_given = n_given + 1
  end
end
local n_open = redis.call('ZCARD', later)
for _, priority in ipairs({'interactive', 'bulk'}) do
  local n_entries = redis.pcall('XLEN', partition .. 'jobs:' .. priority)
  n_open = n_open + (type(n_entries) == 'number' and n_entries or 1) -- another client may have overwritten the stream
end
return {now, n_given, n_open, unpack(redis.call('ZRANGEBYSCORE', deadlines, '-inf', now, 'LIMIT', 0, count))}
