-- Shared by the scripts: put in front of each of them when they are loaded.
--
-- A job's hash has the fields
--   request       msgpack of JobRequest             status      queued | running | finished | failed
--   priority      interactive | bulk                attempt     the fence: only the newest attempt writes
--   entry         its id in the job stream          worker      who runs it, or ran it last
--   generated     tokens stored so far              cancel      1 when somebody asked
--   ttl_ms        life after its end                queue_deadline_ms   0: none
--   idempotency   key of its idempotency record     submitted_ms, started_ms, finished_ms
--   generated_at_start   tokens stored when its newest attempt began
--   crashes       workers that died with it in a row without it having stored a token since its start
--   deaths        each of those, oldest first: "ATTEMPT=WORKER ATTEMPT=WORKER"
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

-- Whether this entry is the one that was made for the job: entries of two streams may have the same id, when they were
-- added in the same millisecond.
local function is_its_entry(own_entry, priority, stream, entry)
  return own_entry == entry and string.sub(stream, -#priority - 1) == ':' .. priority
end

local function deaths_of(job)
  local deaths = {}
  local held = redis.pcall('HGET', job, 'deaths')
  for death in string.gmatch(type(held) == 'string' and held or '', '%S+') do
    deaths[#deaths + 1] = death
  end
  return deaths
end

-- Blames a job: the worker of this attempt died with it. Returns all deaths.
local function add_death(job, attempt, worker)
  local deaths = deaths_of(job)
  deaths[#deaths + 1] = attempt .. '=' .. worker
  redis.call('HSET', job, 'crashes', #deaths, 'deaths', table.concat(deaths, ' '))
  return deaths
end

-- The worker of this attempt lives after all (it was stopped, or cut off): its death is taken back, once. Never fails:
-- it is called for jobs whose keys may hold anything by now, and where a full Redis takes no write. `worker` may be left
-- out; after a failover two workers may have had the same number.
local function forgive(job, attempt, worker)
  local deaths, kept = deaths_of(job), {}
  for _, death in ipairs(deaths) do
    local number, who = string.match(death, '^([^=]*)=(.*)')
    if number ~= tostring(attempt) or (worker and worker ~= who) then
      kept[#kept + 1] = death
    end
  end
  if #kept < #deaths then
    redis.pcall('HSET', job, 'crashes', #kept, 'deaths', table.concat(kept, ' '))
  end
end
