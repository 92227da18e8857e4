-- Starts an attempt of a job that a worker has claimed.
--
-- KEYS[1]  job        hash of the job
-- KEYS[2]  events     stream of the job's events
-- KEYS[3]  stream     job stream that the job was claimed from
-- ARGV[1]  entry      id of the job's entry
-- ARGV[2]  group      consumer group of the job stream
-- ARGV[3]  worker     id of the worker
-- ARGV[4]  channel    channel of the job's events
-- ARGV[5]  cancelled  msgpack of the event `finished` with the reason `cancelled`
-- ARGV[6]  expired    msgpack of the event `finished` with the reason `deadline`
--
-- Returns {'run', attempt, request, generated, queue_ms}
--                    the attempt has started; `generated` tokens are stored, and the first attempt started `queue_ms`
--                    after submit
--         {'gone'}   the job does not exist; the caller makes a dead letter of the entry
--         {'done'}   the job has ended, or this is not its entry; the entry was dropped
--         {'ended'}  the job was cancelled, or its queue deadline has passed; it has ended here

local job, events, stream = KEYS[1], KEYS[2], KEYS[3]
local entry, group, worker, channel = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

local state = redis.call('HMGET', job,
  'status', 'entry', 'cancel', 'queue_deadline_ms', 'submitted_ms', 'started_ms', 'priority',
  'generated', 'generated_at_start')
if not state[1] then
  return {'gone'}
end
if has_ended(state[1]) or not is_entry_of_job(state[2], state[7], stream, entry) then
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
  redis.call('HDEL', job, 'crashes', 'deaths') -- the last attempt stored tokens, so earlier crashes no longer count
end
redis.call('HSET', job, 'status', 'running', 'worker', worker, 'generated_at_start', state[8])
redis.call('HSETNX', job, 'started_ms', now)
emit(events, channel, cmsgpack.pack({type = 'started', attempt = attempt, worker = worker}))
local started = tonumber(redis.call('HGET', job, 'started_ms'))
return {
  'run', attempt, redis.call('HGET', job, 'request') or '', tonumber(state[8]),
  started - tonumber(state[5]),
}
