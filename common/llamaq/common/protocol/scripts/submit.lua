-- Puts a job into its queue, unless a job with the same idempotency key exists or the queue is full.
-- A repeated call with the same job id submits the job once.
--
-- KEYS[1]  job          hash of the job
-- KEYS[2]  stream       job stream of the job's priority
-- KEYS[3]  other        job stream of the other priority
-- KEYS[4]  config       hash with max_queue, which workers write
-- KEYS[5]  idempotency  record of the idempotency key, a string with a job id; not used if ARGV[6] is ''
-- ARGV[1]  id           id of the job
-- ARGV[2]  request      msgpack of JobRequest
-- ARGV[3]  priority     'interactive' | 'bulk'
-- ARGV[4]  group        consumer group of the job streams
-- ARGV[5]  ttl_ms       how long the job's keys live after its end, in ms
-- ARGV[6]  digest       digest of the request of a job with an idempotency key; '': the job has no key
-- ARGV[7]  timeout_ms   longest wait for the first start, in ms; 0: no limit
-- ARGV[8]  returned     msgpack of the parameters that the result contains
-- ARGV[9]  events_ttl   how long the events live after an end that stored the output, in ms
--
-- Returns {'ok', id}                    the job is in the queue
--         {'same', earlier id}          a job with the same idempotency key exists; nothing was submitted
--         {'conflict', earlier id}      such a job exists and has another request; nothing was submitted
--         {'full', waiting, max_queue}  `waiting` jobs wait; nothing was submitted

local job, stream, other, config, idempotency = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local id, group, digest = ARGV[1], ARGV[4], ARGV[6]

if redis.call('EXISTS', job) == 1 then
  return {'ok', id}
end
if digest ~= '' then
  local earlier = redis.call('GET', idempotency)
  -- The earlier job has the same hash tag. If its hash was deleted, the key may be used again.
  local known = earlier and redis.pcall('HGET', string.sub(job, 1, #job - #id) .. earlier, 'digest')
  if type(known) == 'string' then
    return {known == digest and 'same' or 'conflict', earlier}
  end
end

-- Returns the number of entries that no worker has claimed: all entries minus the pending entries. Until the first
-- worker has created the group, XPENDING returns an error.
local function waiting(key)
  local pending = redis.pcall('XPENDING', key, group)
  return redis.call('XLEN', key) - ((type(pending) == 'table' and not pending.err and pending[1]) or 0)
end

local max_queue = tonumber(redis.call('HGET', config, 'max_queue') or '0')
if max_queue > 0 then
  local depth = waiting(stream) + waiting(other)
  if depth >= max_queue then
    return {'full', depth, max_queue}
  end
end

local now = now_ms()
local wait = tonumber(ARGV[7])
local entry = redis.call('XADD', stream, '*', 'id', id)
redis.call('HSET', job,
  'request', ARGV[2], 'status', 'queued', 'priority', ARGV[3], 'attempt', 0, 'entry', entry, 'generated', 0,
  'ttl_ms', ARGV[5], 'events_ttl_ms', ARGV[9], 'returned', ARGV[8], 'submitted_ms', now,
  'queue_deadline_ms', wait > 0 and now + wait or 0)
if digest ~= '' then
  redis.call('HSET', job, 'idempotency', idempotency, 'digest', digest)
  redis.call('SET', idempotency, id)
end
return {'ok', id}
