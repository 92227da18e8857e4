-- Ends a job in one step: stores its last tokens, emits its terminal event, stores its stats and output, and drops its
-- entry.
--
-- KEYS[1]    job       hash of the job
-- KEYS[2]    events    stream of the job's events
-- KEYS[3]    stream    job stream that the job was claimed from
-- ARGV[1]    attempt   number of the caller's attempt
-- ARGV[2]    group     consumer group of the job stream
-- ARGV[3]    entry     id of the job's entry
-- ARGV[4]    channel   channel of the job's events
-- ARGV[5]    offset    number of tokens of the job before the last tokens
-- ARGV[6]    count     number of the last tokens
-- ARGV[7]    payload   msgpack of the event `tokens` with the last tokens; '': there are none
-- ARGV[8]    terminal  msgpack of the terminal event
-- ARGV[9]    status    'finished' | 'failed'
-- ARGV[10..] fields    further fields of the hash: name, value, name, value, ...
--
-- Returns {'ok'}              the job has ended
--         {'resend', stored}  the job has not ended: Redis has `stored` tokens, not `offset`. Send from token `stored`
--         {'lost'}            a newer attempt exists, or the job has ended, perhaps by an earlier try of this call

local job, events, stream = KEYS[1], KEYS[2], KEYS[3]
local attempt, group, entry, channel = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local offset, count, payload = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7]

local state = redis.call('HMGET', job, 'status', 'attempt', 'generated')
if state[1] ~= 'running' or state[2] ~= attempt then
  remove_death(job, attempt)
  return {'lost'}
end
local kind = redis.call('TYPE', events).ok
if kind ~= 'stream' and kind ~= 'none' then
  -- Another client overwrote the key. The worker has all tokens, and sends them again from the first token.
  redis.call('DEL', events)
  redis.call('HSET', job, 'generated', 0)
  return {'resend', 0}
end
if tonumber(state[3]) ~= offset then
  return {'resend', tonumber(state[3])}
end
redis.call('HINCRBY', job, 'generated', count)
if payload ~= '' then
  emit(events, channel, payload)
end
local fields = {}
for i = 10, #ARGV do
  fields[#fields + 1] = ARGV[i]
end
terminate(job, events, channel, stream, group, entry, ARGV[9], ARGV[8], fields)
return {'ok'}
