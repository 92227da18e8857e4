-- Ends a job: its last tokens, its terminal event, stats and output, and its place in the queue, in one step.
--
-- KEYS[1] job   hash       KEYS[2] events   stream of its events   KEYS[3] stream   job stream it was claimed from
-- ARGV[1] attempt          ARGV[2] consumer group                  ARGV[3] entry id
-- ARGV[4] channel          ARGV[5] offset of the first token       ARGV[6] number of tokens
-- ARGV[7] `tokens` event, msgpack, '' for none                     ARGV[8] terminal event, msgpack
-- ARGV[9] 'finished' or 'failed'                                   ARGV[10...] further fields of the hash
--
-- Returns {'ok'} | {'resend', tokens stored}   the last tokens do not go on where the stored ones end
--       | {'lost'}  a newer attempt exists, or the job has ended (perhaps by this very call, made twice)

local job, events, stream = KEYS[1], KEYS[2], KEYS[3]
local attempt, group, entry, channel = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local offset, count, payload = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7]

local state = redis.call('HMGET', job, 'status', 'attempt', 'generated')
if state[1] ~= 'running' or state[2] ~= attempt then
  forgive(job, attempt)
  return {'lost'}
end
local kind = redis.call('TYPE', events).ok
if kind ~= 'stream' and kind ~= 'none' then
  -- Somebody wrote over the events. The worker has them all: it sends them again from the first one.
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
