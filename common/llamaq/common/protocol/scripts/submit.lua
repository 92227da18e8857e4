-- Puts a job into its queue, or finds that the same idempotency key has one, or that the queue is full.
-- Running it twice with the same job id submits once.
--
-- KEYS[1] job          hash of the job
-- KEYS[2] stream       job stream of its priority
-- KEYS[3] other        job stream of the other priority
-- KEYS[4] config       hash with max_queue, written by workers
-- KEYS[5] idempotency  record of its idempotency key; not touched when ARGV[6] is '0'
-- ARGV[1] job id       ARGV[2] request, msgpack     ARGV[3] priority     ARGV[4] consumer group
-- ARGV[5] ttl_ms of the result                      ARGV[6] '1' with an idempotency key, else '0'
-- ARGV[7] queue_timeout_ms, 0 for none
--
-- Returns {'ok', job id} | {'same', job id of the earlier one} | {'full', waiting, max_queue}

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

-- Entries that no worker has claimed: the length less those pending in the group, which a worker creates.
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
