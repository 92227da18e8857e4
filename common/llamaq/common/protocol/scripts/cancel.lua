-- Cancels a job: one that waits ends here, one that runs is marked, and its worker hears of it at its next flush.
--
-- KEYS[1] job          hash                      KEYS[2] events   stream of its events
-- KEYS[3] interactive  job stream                KEYS[4] bulk     job stream
-- ARGV[1] consumer group   ARGV[2] channel       ARGV[3] terminal event, msgpack: cancelled
--
-- Returns 'gone' there is no such job | 'done' it had ended | 'cancelled' it waited | 'requested' it runs

local job, events = KEYS[1], KEYS[2]
local state = redis.call('HMGET', job, 'status', 'priority', 'entry')
if not state[1] then
  return 'gone'
end
if has_ended(state[1]) then
  return 'done'
end
redis.call('HSET', job, 'cancel', 1)
if state[1] ~= 'queued' then
  return 'requested'
end
local stream = state[2] == 'bulk' and KEYS[4] or KEYS[3]
terminate(job, events, ARGV[2], stream, ARGV[1], state[3], 'finished', ARGV[3], {'finish_reason', 'cancelled'})
return 'cancelled'
