-- Sets the status and other fields of a batch, if the caller is its runner.
--
-- KEYS[1]  hash      the batch
-- ARGV[1]  text      id of the runner
-- ARGV[2]  text      the new status. A batch that is being cancelled is not `in_progress` again.
-- ARGV[3]  integer   time in s since the epoch, for the field STATUS_at
-- ARGV[4]  integer   s until the batch expires; 0: as before
-- ARGV[5...]         names and values of other fields
--
-- Returns the status. An empty text: another server runs the batch.
local status, runner = unpack(redis.call('HMGET', KEYS[1], 'status', 'runner'))
if runner ~= ARGV[1] then
  return ''
end
for place = 5, #ARGV, 2 do
  redis.call('HSET', KEYS[1], ARGV[place], ARGV[place + 1])
end
if status == 'cancelling' and ARGV[2] == 'in_progress' then
  return status
end
redis.call('HSET', KEYS[1], 'status', ARGV[2])
redis.call('HSETNX', KEYS[1], ARGV[2] .. '_at', ARGV[3])
if ARGV[4] ~= '0' then
  redis.call('EXPIRE', KEYS[1], ARGV[4])
end
return ARGV[2]
