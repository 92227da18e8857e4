-- Functions that the scripts share. This file is put in front of each script when the script is loaded.
--
-- Fields of a job's hash:
--   request               msgpack of JobRequest
--   status                'queued' | 'running' | 'finished' | 'failed'
--   priority              'interactive' | 'bulk'
--   entry                 id of the job's entry in its job stream
--   attempt               number of the newest attempt; only this attempt may write (the fence)
--   worker                id of the worker that runs the job or ran it last
--   generated             number of tokens stored so far
--   generated_at_start    number of tokens that were stored when the newest attempt began
--   cancel                1 after a client has called cancel
--   ttl_ms                how long the job's keys live after its end, in ms
--   queue_deadline_ms     latest start of the first attempt, in ms since the epoch; 0: none
--   idempotency           key of the job's idempotency record; '': none
--   submitted_ms, started_ms, finished_ms    times in ms since the epoch
--   crashes               number of consecutive workers that died while they ran the job and before they stored a token
--   deaths                attempt and worker of each of these crashes, oldest first: "ATTEMPT=WORKER ATTEMPT=WORKER"
--   finish_reason, stats (msgpack), output (msgpack)    of a finished job
--   error (msgpack)       of a failed job

-- Returns the time of the server in ms since the epoch.
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Appends an event to the event stream and publishes it to the subscribers. Returns the number of subscribers.
local function emit(events, channel, payload)
  redis.call('XADD', events, '*', 'e', payload)
  return redis.call('PUBLISH', channel, payload)
end

-- Acknowledges and deletes an entry. A deleted entry that is not acknowledged would stay pending and could never be
-- claimed.
local function drop_entry(stream, group, entry)
  redis.pcall('XACK', stream, group, entry)
  redis.call('XDEL', stream, entry)
end

-- Ends a job: emits its terminal event, sets its status, drops its entry and starts the time to live of its keys.
-- Every job ends in this function, exactly once. `fields` is a flat list of further fields for the hash.
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

-- Returns whether this entry was made for the job. The id alone does not prove it: entries of two streams have the same
-- id when they were added in the same millisecond.
local function is_entry_of_job(own_entry, priority, stream, entry)
  return own_entry == entry and string.sub(stream, -#priority - 1) == ':' .. priority
end

local function deaths_of(job)
  local deaths = {}
  local stored = redis.pcall('HGET', job, 'deaths')
  for death in string.gmatch(type(stored) == 'string' and stored or '', '%S+') do
    deaths[#deaths + 1] = death
  end
  return deaths
end

-- Records that the worker of this attempt died while it ran the job. Returns all recorded deaths of the job.
local function add_death(job, attempt, worker)
  local deaths = deaths_of(job)
  deaths[#deaths + 1] = attempt .. '=' .. worker
  redis.call('HSET', job, 'crashes', #deaths, 'deaths', table.concat(deaths, ' '))
  return deaths
end

-- Removes the recorded death of this attempt. The caller is the worker of this attempt, which was only paused or
-- disconnected. If `worker` is given, only a death of this worker is removed: after a failover of Redis, two workers
-- may have the same attempt number. The function ignores errors of Redis: another client may have changed the type of
-- the job's keys, or a full Redis may refuse the write.
local function remove_death(job, attempt, worker)
  local deaths, remaining = deaths_of(job), {}
  for _, death in ipairs(deaths) do
    local number, dead_worker = string.match(death, '^([^=]*)=(.*)')
    if number ~= tostring(attempt) or (worker and worker ~= dead_worker) then
      remaining[#remaining + 1] = death
    end
  end
  if #remaining < #deaths then
    redis.pcall('HSET', job, 'crashes', #remaining, 'deaths', table.concat(remaining, ' '))
  end
end
