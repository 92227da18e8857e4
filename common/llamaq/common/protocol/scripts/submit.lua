-- Puts a job into its queue, unless a job with the same idempotency key exists or the queue is full.
-- A repeated call with the same job id submits the job once.
--
-- KEYS[1]  job          hash of the job
-- KEYS[2]  stream       job stream of the job's priority
-- KEYS[3]  other        job stream of the other priority
-- KEYS[4]  config       hash with the settings that workers write
-- KEYS[5]  idempotency  record of the idempotency key, a string with a job id; not used if `digest` is ''
-- ARGV[1]  id           id of the job
-- ARGV[2]  request      msgpack of JobRequest
-- ARGV[3]  priority     'interactive' | 'bulk'
-- ARGV[4]  group        consumer group of the job streams
-- ARGV[5]  ttl_ms       how long the job's keys live after its end, in ms
-- ARGV[6]  digest       digest of the request of a job with an idempotency key; '': the job has no key
-- ARGV[7]  queue_ms     longest wait for the first slot, in ms; 0: no limit
-- ARGV[8]  returned     msgpack of the parameters that the result contains
-- ARGV[9]  events_ttl   how long the events live after an end that stored the output, in ms
-- ARGV[10] life_ms      longest time from submit to the end of the job, in ms; 0: no limit
-- ARGV[11] timeout_ms   longest time that the job may have a slot, in ms; 0: no limit
-- ARGV[12] partitions   number of partitions that the client knows; 0: it submits to a queue of another client
-- ARGV[13] delay_ms     time after the submit at which the job is due, in ms; 0: at once
-- ARGV[14] run_at_ms    time at which the job is due, in ms since the epoch; 0: at once
-- ARGV[15] retries      number of retries after temporary failures
-- ARGV[16] tenant       name of the tenant; '': none
-- ARGV[17] kind         what the job computes: 'generation' | 'embedding' | 'reranking'
-- ARGV[18] is_watched   '1': the job is cancelled when it has no subscribers (`cancel_on_disconnect`); '0': it is not
--
-- Returns {'ok', id}                    the job is in the queue, or in the sorted set `later` until it is due
--         {'same', earlier id}          a job with the same idempotency key exists; nothing was submitted
--         {'conflict', earlier id}      such a job exists and has another request; nothing was submitted
--         {'full', waiting, max_queue}  `waiting` jobs wait; nothing was submitted
--         {'draining'}                  the queue is draining; nothing was submitted
--         {'partitions', number}        the workers have another number of partitions; nothing was submitted
--         {'kind', kind}                the workers of the queue run jobs of another kind; nothing was submitted

local job, stream, other, config, idempotency = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local id, request, priority, group, ttl_ms, digest, queue_ms, returned, events_ttl, life_ms, timeout_ms, partitions,
  delay_ms, run_at_ms, retries, tenant, kind, is_watched = unpack(ARGV)

if redis.call('EXISTS', job) == 1 then
  return {'ok', id}
end
local max_queue, queue_partitions, mode, queue_kind = unpack(redis.call('HMGET', config,
  'max_queue', 'partitions', 'mode', 'kind'))
if partitions ~= '0' and queue_partitions and queue_partitions ~= partitions then
  return {'partitions', queue_partitions}
end
if queue_kind and queue_kind ~= kind then
  return {'kind', queue_kind}
end
if digest ~= '' then
  local earlier = redis.call('GET', idempotency)
  -- The earlier job has the same hash tag. If its hash was deleted, the key may be used again.
  local known = earlier and redis.pcall('HGET', string.sub(job, 1, #job - #id) .. earlier, 'digest')
  if type(known) == 'string' then
    return {known == digest and 'same' or 'conflict', earlier}
  end
end

if mode == 'draining' then
  return {'draining'}
end

max_queue = tonumber(max_queue or '0')
local n_jobs = max_queue > 0 and redis.call('XLEN', stream) + redis.call('XLEN', other) or 0
if max_queue > 0 then
  n_jobs = n_jobs + redis.call('ZCARD', string.match(job, '^(.*:)job:') .. 'later') -- their requests take memory too
end
if n_jobs > 0 and n_jobs >= max_queue then
  local depth = n_jobs - count_running(stream, group) - count_running(other, group)
  if depth >= max_queue then
    return {'full', depth, max_queue}
  end
end

local now = now_ms()
local wait, life = tonumber(queue_ms), tonumber(life_ms)
local run_at = math.max(now + tonumber(delay_ms), tonumber(run_at_ms))
local queue_deadline, deadline = wait > 0 and run_at + wait or 0, life > 0 and now + life or 0
local number = count_events(job, priority .. ':submitted', 1)
local entry, entry_tenant = false, tenant ~= '' and tenant or nil
if run_at <= now then
  entry, entry_tenant = add_entry(stream, id, tenant, type(number) == 'number' and number)
  if type(entry) == 'table' then
    return entry -- Redis has refused the entry
  end
end
local place = entry and {'entry', entry} or {'waits_from_ms', run_at}
if entry_tenant then
  place[3], place[4] = 'tenant', entry_tenant
end
redis.call('HSET', job,
  'request', request, 'status', 'queued', 'priority', priority, 'attempt', 0, 'generated', 0,
  'ttl_ms', ttl_ms, 'events_ttl_ms', events_ttl, 'returned', returned, 'submitted_ms', now,
  'queue_deadline_ms', queue_deadline, 'deadline_ms', deadline, 'timeout_ms', timeout_ms,
  unpack(place))
if not entry then
  set_later(job, run_at)
  redis.pcall('XGROUP', 'CREATE', stream, group, '0', 'MKSTREAM') -- a queue is found by its job streams
end
if retries ~= '0' then
  redis.call('HSET', job, 'retries_left', retries)
end
if wait > 0 or life > 0 then
  set_next_deadline(job, next_deadline_ms('queued', nil, queue_deadline, deadline))
end
if is_watched == '1' then
  redis.call('ZADD', string.match(job, '^(.*:)job:') .. 'watched', now, id)
end
if digest ~= '' then
  redis.call('HSET', job, 'idempotency', idempotency, 'digest', digest)
  redis.call('SET', idempotency, id)
end
return {'ok', id}
