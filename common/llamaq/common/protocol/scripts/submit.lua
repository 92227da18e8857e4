-- Puts a job into its queue, unless a job with the same idempotency key exists or the queue is full.
-- A repeated call with the same job id submits the job once.
--
-- KEYS[1]  job          hash of the job
-- KEYS[2]  stream       job stream of the job's priority
-- KEYS[3]  other        job stream of the other priority
-- KEYS[4]  config       hash with max_queue, which workers write
-- KEYS[5]  idempotency  record of the idempotency key, a string with a job id; not used if ARGV[6] is '0'
-- ARGV[1]  id           id of the job
-- ARGV[2]  request      msgpack of JobRequest
-- ARGV[3]  priority     'interactive' | 'bulk'
-- ARGV[4]  group        consumer group of the job streams
-- ARGV[5]  ttl_ms       how long the job's keys live after its end, in ms
-- ARGV[6]  keyed        '1': the job has an idempotency key; '0': it has none
-- ARGV[7]  timeout_ms   longest wait for the first start, in ms; 0: no limit
--
-- Returns {'ok', id}                    the job is in the queue
--         {'same', earlier id}          a job with the same idempotency key exists; nothing was submitted
--         {'full', waiting, max_queue}  `waiting` jobs wait; nothing was submitted

local job, stream, other, config, idempotency = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local id, group, keyed = ARGV[1], ARGV[4], ARGV[6] == '1'

if redis.call('EXISTS', job) == 1 then
  return {'ok', id}
end
if keyed then
  local earlier = redis.call('GET', idempotency)
  if earlier then
    return {'same', earlier}
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
  'ttl_ms', ARGV[5], 'submitted_ms', now, 'queue_deadline_ms', wait > 0 and now + wait or 0,
  'idempotency', keyed and idempotency or '')
if keyed then
  redis.call('SET', idempotency, id)
end
return {'ok', id}
