-- Lets the runner of a batch cancel it.
--
-- KEYS[1]  hash      the batch
-- ARGV[1]  integer   time in s since the epoch
--
-- Returns the status.
local status = redis.call('HGET', KEYS[1], 'status')
if status == 'validating' or status == 'in_progress' then
  redis.call('HSET', KEYS[1], 'status', 'cancelling', 'cancelling_at', ARGV[1])
  return 'cancelling'
end
return status
