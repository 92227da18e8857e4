-- Appends lines to the output of a batch, if the caller is its runner. A repeated call appends nothing.
--
-- KEYS[1]  hash      the batch
-- KEYS[2]  list      blocks of the output file
-- KEYS[3]  list      blocks of the error file
-- ARGV[1]  text      id of the runner
-- ARGV[2]  integer   number of calls before this one, by all runners
-- ARGV[3]  integer   time in s since the epoch at which the files expire, if the batch never ends
-- ARGV[4]  integer   number of blocks of the output file; the others are of the error file
-- ARGV[5]  integer   number of names and numbers that follow: counters of the batch, and what is added to each
-- ARGV[6...]         names and numbers, then the blocks
--
-- Returns the number of calls, this one included. -1: another server runs the batch.
if redis.call('HGET', KEYS[1], 'runner') ~= ARGV[1] then
  return -1
end
local before = tonumber(ARGV[2])
local calls = tonumber(redis.call('HGET', KEYS[1], 'writes') or '0')
if calls ~= before then  -- redis-py has repeated a call whose reply was lost
  return calls
end
local n_output, n_counters = tonumber(ARGV[4]), tonumber(ARGV[5])
for place = 6, 5 + n_counters, 2 do
  redis.call('HINCRBY', KEYS[1], ARGV[place], ARGV[place + 1])
end
for place = 6 + n_counters, #ARGV do
  local file = place < 6 + n_counters + n_output and KEYS[2] or KEYS[3]
  redis.call('RPUSH', file, ARGV[place])
  redis.call('EXPIREAT', file, ARGV[3])
end
redis.call('HSET', KEYS[1], 'starts', 0)
return redis.call('HINCRBY', KEYS[1], 'writes', 1)
