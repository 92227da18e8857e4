-- Shared by the scripts: put in front of each of them when they are loaded.
--
-- A job's hash has the fields
--   request       msgpack of JobRequest             status      queued | running | finished | failed
--   priority      interactive | bulk                attempt     the fence: only the newest attempt writes
--   entry         its id in the job stream          worker      who runs it, or ran it last
--   generated     tokens stored so far              cancel      1 when somebody asked
--   ttl_ms        life after its end                queue_deadline_ms   0: none
--   idempotency   key of its idempotency record     submitted_ms, started_ms, finished_ms
--   finish_reason, stats (msgpack), output (msgpack) of a finished job; error (msgpack) of a failed one

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- An event goes to those who listen, and into the stream for those who come later. Returns the number of listeners.
local function emit(events, channel, payload)
  redis.call('XADD', events, '*', 'e', payload)
  return redis.call('PUBLISH', channel, payload)
end

-- Acknowledge and delete together: a deleted entry that is still pending could never be claimed again.
local function drop_entry(stream, group, entry)
  redis.pcall('XACK', stream, group, entry)
  redis.call('XDEL', stream, entry)
end

-- The one way in which a job ends: one terminal event, its status, and the clock of its keys set going.
-- `fields` are further fields of the hash, as a flat list.
local function terminate(job, events, channel, stream, group, entry, status, terminal, fields)
  emit(events, channel, terminal)
  redis.call('HSET', job, 'status', status, 'finished_ms', now_ms(), unpack(fields))
  drop_entry(stream, group, entry)
  local ttl = redis.call('HGET', job, 'ttl_ms')
  redis.call('PEXPIRE', job, ttl)
  redis.call('PEXPIRE', events, ttl)
  local idempotency = redis.call('HGET', job, 'idempotency')
  if idempotency and idempotency ~= '' then
    redis.call('PEXPIRE', idempotency, ttl)
  end
end

local function has_ended(status)
  return status == 'finished' or status == 'failed'
end
