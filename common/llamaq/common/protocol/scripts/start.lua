-- Begins an attempt of a job that a worker has claimed from the stream.
--
-- KEYS[1] job       hash of the job
-- KEYS[2] events    stream of its events
-- KEYS[3] stream    job stream it was claimed from
-- ARGV[1] entry id  ARGV[2] consumer group          ARGV[3] worker id     ARGV[4] channel of its events
-- ARGV[5] terminal event, msgpack: cancelled        ARGV[6] terminal event, msgpack: deadline
--
-- Returns {'run', attempt, request, tokens generated so far, queue_ms}
--       | {'gone'}   there is no such job; the entry is left for the caller to bury
--       | {'done'}   it has ended, or this is not its entry; the entry was dropped
--       | {'ended'}  cancel or deadline came before the start; it ended here

local job, events, stream = KEYS[1], KEYS[2], KEYS[3]
local entry, group, worker, channel = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

local state = redis.call('HMGET', job,
  'status', 'entry', 'cancel', 'queue_deadline_ms', 'submitted_ms', 'started_ms', 'priority',
  'generated', 'generated_at_start')
if not state[1] then
  return {'gone'}
end
if has_ended(state[1]) or not is_its_entry(state[2], state[7], stream, entry) then
  drop_entry(stream, group, entry)
  return {'done'}
end
if state[3] then
  terminate(job, events, channel, stream, group, entry, 'finished', ARGV[5], {'finish_reason', 'cancelled'})
  return {'ended'}
end

local now = now_ms()
local deadline = tonumber(state[4])
if not state[6] and deadline > 0 and now >= deadline then
  terminate(job, events, channel, stream, group, entry, 'finished', ARGV[6], {'finish_reason', 'deadline'})
  return {'ended'}
end

local attempt = redis.call('HINCRBY', job, 'attempt', 1)
if state[9] and state[8] ~= state[9] then
  redis.call('HDEL', job, 'crashes', 'deaths') -- it has stored tokens since: it is not what they died of
end
redis.call('HSET', job, 'status', 'running', 'worker', worker, 'generated_at_start', state[8])
redis.call('HSETNX', job, 'started_ms', now)
emit(events, channel, cmsgpack.pack({type = 'started', attempt = attempt, worker = worker}))
local started = tonumber(redis.call('HGET', job, 'started_ms'))
return {
  'run', attempt, redis.call('HGET', job, 'request') or '', tonumber(state[8]),
  started - tonumber(state[5]),
}
