-- Functions that the scripts share. script_source.py puts those that a script needs in front of it: of `_metrics.lua`,
-- `_turns.lua`, this file, `_claim.lua` and the worker's `_shared.lua`, in this order.
--
-- Fields of a job's hash:
--   request               msgpack of JobRequest; deleted when the job finishes
--   returned              msgpack of the parameters that the result contains: seed and metadata
--   status                'queued' | 'running' | 'finished' | 'failed'. A queued job has no slot: it waits in its job
--                         stream, or in the worker that has claimed it
--   priority              'interactive' | 'bulk'
--   entry                 id of the job's entry in its job stream; absent while the job is not due
--   tenant                tenant in whose turns the job is claimed (see _turns.lua); '': that of the jobs without a tenant;
--                         absent: the job is claimed in the order of its job stream
--   run_at_ms             time in ms since the epoch at which the job is due; absent: it is due. A job that is not due is
--                         `queued`, has no entry, and is in the sorted set `later`
--   waits_from_ms         time in ms since the epoch from which the job waits, if that is not `submitted_ms`
--   retries_left          number of retries left after temporary failures; absent: the job has the option `retries=0`
--   retried               number of retries so far
--   retry_error           msgpack of the event `failed` of the last failure that was retried
--   attempt               number of the newest attempt; only this attempt may write (the fence)
--   worker                id of the worker that claimed the job last
--   lease_ms              lease of this worker in ms
--   claimed_ms            time in ms since the epoch from which the job waits in this worker: the claim, or a preemption
--   move_factor           how long the job stays in this worker without a slot, as a multiple of the usual time, before
--                         another worker may take it: 1/4 for an interrupted job, twice as long after each move
--   started_attempt       number of the newest attempt that had a slot. If it is `attempt`, a queued job was preempted:
--                         it waits in its worker for another slot. Negative: the attempt had a slot, but another
--                         worker has taken the job from its worker
--   at_risk               1 from the time at which this worker began to prepare the job: if it dies, that counts as a
--                         crash
--   model                 fingerprint of the model that generates the tokens
--   generated             number of tokens stored so far
--   generated_at_start    number of tokens that were stored when the newest attempt began
--   token_times           when these tokens were generated: text of `TokenTimes`
--   withheld              msgpack of an event `tokens` with the text that is withheld after these tokens: the beginning of a
--                         character, or what may be a stop string; '': there is none
--   cancel                1 after a client has called cancel
--   alone_ms              time in ms since the epoch from which checks have found no subscriber of the waiting job
--                         (abandoned.lua); absent: the last check has found one, or the job has no `cancel_on_disconnect`
--   ttl_ms                how long the job's keys live after its end, in ms
--   events_ttl_ms         how long the events live after an end that stored the output, in ms
--   deadline_ms           latest end of the job, in ms since the epoch; 0: none
--   timeout_ms            longest time that the job may have a slot, in ms; 0: no limit
--   slot_ms               time in ms that the job has had a slot so far, over all attempts
--   queue_deadline_ms     latest time of the first slot, in ms since the epoch; 0: none
--   idempotency           key of the job's idempotency record; absent: the job has no idempotency key
--   digest                digest of the request of a job with an idempotency key
--   submitted_ms, started_ms, finished_ms    times in ms since the epoch; the job starts when it has its first slot
--   crashes               number of consecutive workers that died with the job before they stored a token of it
--   deaths                attempt and worker of each of these crashes, oldest first: "ATTEMPT=WORKER ATTEMPT=WORKER"
--   finish_reason, stats (msgpack)    of a finished job
--   error                 msgpack of the event `failed` of a failed job
--   output                compressed msgpack of text and tokens, if a worker ended the job
--   usage                 'PROMPT COMPUTED CACHED TIER', the tokens of the prompt of a job that a worker ends

-- Pending entries of the consumer group belong to the consumer WAITING until their job has a slot, and then to the
-- consumer named after the worker that runs the job. The idle time of an entry tells when its lease expires.
local WAITING = 'waiting'
local EXPIRED_IDLE_MS = 100000000000   -- the idle time at which a lease expires
local REQUEUED_IDLE_MS = 1000000000000 -- the idle time of a requeued entry, far above that of an expired one

-- Does the part of a call that belongs to one of several jobs. An error affects this job alone: another client may have
-- overwritten its keys. Returns the result of `work`, or {'error', text}.
local function for_one_job(work, ...)
  local is_done, result = pcall(work, ...)
  if is_done then
    return result
  end
  return {'error', type(result) == 'table' and result.err or tostring(result)}
end

-- Returns whether the error text of Redis tells that this server is no longer the master. Then the caller must reconnect.
local function is_demoted(text)
  return string.find(text, 'READONLY', 1, true) or string.find(text, 'NOREPLICAS', 1, true)
end

-- Returns whether the error text of Redis tells that it has reached `maxmemory`.
local function is_full(text)
  return string.find(text, 'when used memory', 1, true)
end

-- Returns the reply of a script that was called for several jobs: `replies`, or an error if the server is no longer the
-- master.
local function reply_for_jobs(replies)
  for _, reply in ipairs(replies) do
    if type(reply) == 'table' and reply[1] == 'error' and is_demoted(reply[2]) then
      return {err = 'READONLY ' .. reply[2]}
    end
  end
  return replies
end

-- Returns the values of fields of a hash, in the order of their names. The value of a missing field is false. Returns
-- nothing if the key is not a hash: another client has overwritten it.
local function fields_if_hash(key, ...)
  local values = redis.pcall('HMGET', key, ...)
  if not values.err then
    return unpack(values)
  end
end

-- Returns the time of the server in ms since the epoch, read once in a call.
local time_of_call = false
local function now_ms()
  if not time_of_call then
    local time = redis.call('TIME')
    time_of_call = time[1] * 1000 + math.floor(time[2] / 1000)
  end
  return time_of_call
end

-- Returns the array that Redis has replied. It is empty if the reply is an error: the job stream has no consumer group until
-- the first worker has created it, or another client has overwritten the stream.
local function array_or_empty(reply)
  return reply.err and {} or reply
end

-- Gives a pending entry to a consumer, with a lease of `lease_ms`: its idle time reaches EXPIRED_IDLE_MS when the lease
-- expires. So the worker that holds the entry decides how long the lease is, not the one that searches for expired ones.
local function renew_lease(stream, group, consumer, entry, lease_ms)
  redis.call('XCLAIM', stream, group, consumer, 0, entry, 'IDLE', EXPIRED_IDLE_MS - lease_ms, 'JUSTID')
end

-- Returns whether an entry is pending: a worker has read it, and nothing has acknowledged it.
local function is_pending(stream, group, entry)
  return #redis.call('XPENDING', stream, group, entry, entry, 1) > 0
end

-- Returns the number of pending entries of a job stream, and an array with {consumer, number of its entries}. Until the
-- first worker has created the group, XPENDING returns an error, and no entry is pending.
local function pending_by_consumer(stream, group)
  local summary = redis.pcall('XPENDING', stream, group)
  return summary[1] or 0, summary[4] or {}
end

-- Returns the number of running jobs of a job stream: the entries of workers whose lease has not expired. All other
-- entries of the stream wait.
local function count_running(stream, group)
  local _, consumers = pending_by_consumer(stream, group)
  local running = 0
  for _, pair in ipairs(consumers) do
    local consumer, n_pending = unpack(pair)
    if consumer ~= WAITING then
      local n_expired = #redis.call('XPENDING', stream, group, 'IDLE', EXPIRED_IDLE_MS, '-', '+', n_pending, consumer)
      running = running + tonumber(n_pending) - n_expired
    end
  end
  return running
end

-- Returns the fields of an entry as a flat list. Returns nil if the stream does not have the entry.
local function fields_of_entry(stream, entry)
  local found = redis.call('XRANGE', stream, entry, entry)[1]
  return found and found[2]
end

-- Returns a flat list of names and values as a table of values by name.
local function by_name(list)
  local values = {}
  for i = 1, #list, 2 do
    values[list[i]] = list[i + 1]
  end
  return values
end

-- Acknowledges and deletes an entry. A deleted entry that is not acknowledged would stay pending and could never be
-- claimed. A job that is not due has no entry.
local function drop_entry(stream, group, entry)
  if not entry then
    return
  end
  redis.pcall('XACK', stream, group, entry)
  redis.call('XDEL', stream, entry)
end

-- Lets the later writes of a script succeed although Redis has reached `maxmemory`. Redis checks the limit only at the
-- first write of a script, and never refuses PERSIST. The key must have no expiry, as a job that has not ended, or get a
-- new one later in the script.
local are_writes_allowed = false
local function allow_writes_when_full(key)
  if not are_writes_allowed then
    redis.call('PERSIST', key)
    are_writes_allowed = true
  end
end

-- Emits one of the last events of a job. An event stream that another client has overwritten is deleted, because it
-- must not prevent the end of the job.
local function emit_last(events, channel, payload)
  local added = redis.pcall('XADD', events, '*', 'e', payload)
  if type(added) == 'table' then
    redis.pcall('DEL', events)
  end
  redis.call('PUBLISH', channel, payload)
end

-- How long clients and other workers wait after the deadline of a running or preempted job before they end it. The
-- worker of the job ends it at the deadline, with all its tokens.
local RUNNING_GRACE_MS = 500

-- Returns whether the job has a slot, or was preempted and waits in its worker for another slot. Then only this worker
-- ends the job at a cancel or a deadline, with all its tokens, its withheld text and its stats.
local function has_run_in_worker(status, attempt, started_attempt)
  return status == 'running' or (attempt and attempt == started_attempt)
end

-- Returns whether the event `started` of an attempt was published, whatever the sign of `started_attempt`.
local function was_started(attempt, started_attempt)
  return math.abs(tonumber(started_attempt or '') or 0) == tonumber(attempt)
end

-- Returns the time at which a job that has not ended must end, in ms since the epoch. Returns nil if it has no deadline.
-- The arguments are fields of its hash. The status of a preempted job counts as 'running' here.
local function next_deadline_ms(status, started_ms, queue_deadline_ms, deadline_ms)
  local deadline, queue_deadline = tonumber(deadline_ms or '0') or 0, tonumber(queue_deadline_ms or '0') or 0
  if status == 'running' then
    return deadline > 0 and deadline + RUNNING_GRACE_MS or nil
  end
  if started_ms or queue_deadline <= 0 then
    return deadline > 0 and deadline or nil
  end
  return deadline > 0 and math.min(deadline, queue_deadline) or queue_deadline
end

-- Returns the beginning of the keys of a job's partition, and the id of the job.
local function parts_of_job(job)
  return string.match(job, '^(.*:)job:([^:]+)$')
end

-- Records the deadline of a job; `nil` or false: it has none. The sorted set has the hash tag of the job.
local function set_next_deadline(job, deadline)
  local partition, id = parts_of_job(job)
  if deadline then
    redis.call('ZADD', partition .. 'deadlines', deadline, id)
  else
    redis.call('ZREM', partition .. 'deadlines', id)
  end
end

-- Records when a job without an entry is due. The sorted set has the hash tag of the job.
local function set_later(job, run_at_ms)
  local partition, id = parts_of_job(job)
  redis.call('HSET', job, 'run_at_ms', run_at_ms)
  redis.call('ZADD', partition .. 'later', run_at_ms, id)
end

-- Stores what `add_entry` has returned.
local function set_entry(job, entry, tenant)
  redis.call('HSET', job, 'entry', entry)
  if tenant then
    redis.call('HSET', job, 'tenant', tenant)
  else
    redis.call('HDEL', job, 'tenant')
  end
end

-- Returns the whole number in a field of a hash; nil if the field is absent, or another client has damaged it.
local function whole_number(text)
  local number = tonumber(text or '')
  return number and number >= 0 and number < 2 ^ 50 and number % 1 == 0 and number or nil
end

-- Gives a job its entry if it is due at `now`. Returns whether the job has got its entry. If another client has
-- overwritten the stream, nothing changes. `partition` is the beginning of the keys of the job's partition.
local function give_entry(partition, id, now)
  local job = partition .. 'job:' .. id
  local status, priority, run_at_ms, tenant = fields_if_hash(job, 'status', 'priority', 'run_at_ms', 'tenant')
  local run_at = status == 'queued' and run_at_ms and (whole_number(run_at_ms) or 0)
  if run_at and now < run_at then
    return false
  end
  if run_at then
    allow_writes_when_full(job) -- jobs that end free memory
    local stream = partition .. 'jobs:' .. (priority == 'bulk' and 'bulk' or 'interactive')
    local entry, entry_tenant = add_entry(stream, id, tenant)
    if type(entry) == 'table' then
      return false
    end
    set_entry(job, entry, entry_tenant)
    redis.call('HDEL', job, 'run_at_ms')
  end
  redis.call('ZREM', partition .. 'later', id)
  return run_at and true or false
end

-- The fields of a finished job.
local FINISHED_FIELDS = {'status', 'attempt', 'worker', 'crashes', 'generated', 'submitted_ms', 'started_ms', 'finished_ms',
  'cancel', 'finish_reason', 'stats', 'output', 'returned', 'digest'}

-- All fields of a job but `status`.
local ALL_BUT_STATUS = {'request', 'returned', 'priority', 'entry', 'tenant', 'run_at_ms', 'waits_from_ms', 'retries_left',
  'retried', 'retry_error', 'attempt', 'worker', 'lease_ms', 'claimed_ms', 'move_factor', 'started_attempt', 'at_risk', 'model',
  'generated', 'generated_at_start', 'token_times', 'withheld', 'cancel', 'alone_ms', 'ttl_ms', 'events_ttl_ms',
  'deadline_ms', 'timeout_ms', 'slot_ms', 'queue_deadline_ms', 'idempotency', 'digest', 'submitted_ms', 'started_ms',
  'finished_ms', 'crashes', 'deaths', 'finish_reason', 'stats', 'error', 'output', 'usage'}

-- The fields that are read at the end of a job.
local FIELDS_BEFORE_END = {'status', 'attempt', 'worker', 'started_attempt', 'crashes', 'generated', 'submitted_ms',
  'started_ms', 'cancel', 'returned', 'digest', 'priority', 'waits_from_ms', 'token_times', 'usage', 'ttl_ms',
  'events_ttl_ms', 'idempotency', 'queue_deadline_ms', 'deadline_ms', 'run_at_ms', 'tenant'}

-- How long the keys of a job live after its end if another client has damaged the field `ttl_ms`.
local DAMAGED_TTL_MS = 3600000

-- Returns the fields of the hash of a job that may end now, by name.
local function state_before_end(job)
  local values, state = redis.call('HMGET', job, unpack(FIELDS_BEFORE_END)), {}
  for place, name in ipairs(FIELDS_BEFORE_END) do
    state[name] = values[place]
  end
  return state
end

-- Adds the fields of a job's end to its state. `fields` is a flat list.
local function add_fields_of_end(state, status, fields)
  for place = 1, #fields, 2 do
    state[fields[place]] = fields[place + 1]
  end
  state.status, state.finished_ms = status, now_ms()
  state.ttl_ms = whole_number(state.ttl_ms) or DAMAGED_TTL_MS
end

-- Stores the fields of a finished job, and deletes the others, which are not read any more. All but one are deleted before
-- the fields are stored: then Redis makes the hash table smaller. The hash itself is never deleted: while Redis Cluster moves
-- a slot to another server, a deleted key counts as moved, and this server refuses to write it again.
local function store_result(job, state)
  local fields = {}
  for _, name in ipairs(FINISHED_FIELDS) do
    if state[name] then
      fields[#fields + 1], fields[#fields + 2] = name, state[name]
    end
  end
  redis.call('HDEL', job, unpack(ALL_BUT_STATUS))
  redis.call('HSET', job, unpack(fields))
end

-- Emits the last events of a job, and limits the life of its event stream. The events are deleted after `events_ttl_ms` if
-- the field `output` contains the whole output, or if there is none. Otherwise the events are the only record of the output.
local function emit_end(events, channel, state, unsent, terminal)
  local needs_events = state.generated ~= '0' and not state.output
  local ttl = needs_events and state.ttl_ms or whole_number(state.events_ttl_ms) or 0
  unsent[#unsent + 1] = terminal
  if ttl == 0 then
    redis.pcall('UNLINK', events)
    for _, payload in ipairs(unsent) do
      redis.call('PUBLISH', channel, payload)
    end
  else
    for _, payload in ipairs(unsent) do
      emit_last(events, channel, payload)
    end
    redis.call('PEXPIRE', events, ttl)
  end
end

-- Starts the time to live of a job that has ended, and of its idempotency record.
local function expire_job(job, state)
  redis.call('PEXPIRE', job, state.ttl_ms)
  if state.idempotency then
    redis.call('PEXPIRE', state.idempotency, state.ttl_ms)
  end
end

-- Removes a job that has ended from the sorted set `later`.
local function leave_later(job)
  local partition, id = parts_of_job(job)
  redis.call('HDEL', job, 'run_at_ms')
  redis.call('ZREM', partition .. 'later', id)
end

-- Removes a job that has ended from the sorted set `watched`.
local function leave_watched(job)
  local partition, id = parts_of_job(job)
  redis.call('ZREM', partition .. 'watched', id)
end

-- Ends a job: sets its status, emits its terminal event, starts the time to live of its keys, and drops its entry.
-- Every job ends in this function, exactly once, even when Redis is full. `fields` is a flat list of further fields for
-- the hash. `unsent` is an array with the msgpack of events before the terminal one; nil: there are none. The metrics of the
-- job are added to `counts`, and the caller stores them; nil: they are stored here. `state` is that of `state_before_end`;
-- nil: it is read here.
--
-- An error before the status is set changes nothing. After that, an error of one step must not prevent the other steps:
-- another client may have overwritten a key, or Redis Cluster may have moved a key to another server.
local function terminate(job, events, channel, stream, group, entry, status, terminal, fields, unsent, counts, state)
  allow_writes_when_full(job)
  local counted = counts or {}
  state = state or state_before_end(job)
  add_fields_of_end(state, status, fields)
  if status == 'finished' then
    store_result(job, state)
  else
    redis.call('HSET', job, 'status', status, 'finished_ms', state.finished_ms, unpack(fields))
  end
  pcall(emit_end, events, channel, state, unsent or {}, terminal)
  pcall(expire_job, job, state)
  pcall(drop_entry, stream, group, entry)
  pcall(leave_turns, stream, state.tenant, entry)
  if state.queue_deadline_ms ~= '0' or state.deadline_ms ~= '0' then
    pcall(set_next_deadline, job, nil)
  end
  if state.run_at_ms then
    pcall(leave_later, job)
  end
  pcall(leave_watched, job)
  pcall(add_end, counted, state, terminal)
  if not counts then
    store_counts(job, counted)
  end
end

-- Returns an array with the event of the text that is withheld after the stored tokens. It is empty if there is no such
-- text, or if it belongs to other tokens: Redis has lost tokens, or an older worker has added some.
local function withheld_events(withheld, n_stored)
  local is_read, event = pcall(cmsgpack.unpack, withheld or '')
  return is_read and type(event) == 'table' and event.offset == n_stored and {withheld} or {}
end

-- Ends a job that no worker runs, for the reason 'cancelled' or 'deadline'. Its output and its stats are the tokens of
-- earlier attempts, with the text that was withheld, and the time that it waited for its first slot.
local function end_without_worker(job, events, channel, stream, group, entry, reason)
  local submitted_ms, waits_from_ms, started_ms, generated, withheld = unpack(redis.call('HMGET', job,
    'submitted_ms', 'waits_from_ms', 'started_ms', 'generated', 'withheld'))
  local waits_from, slot = tonumber(waits_from_ms or submitted_ms or ''), tonumber(started_ms or '') or now_ms()
  local n_stored = whole_number(generated) or 0
  local stats = {queue_ms = waits_from and math.max(0, slot - waits_from) or 0, generated_tokens = n_stored}
  local terminal = cmsgpack.pack({type = 'finished', finish_reason = reason, stats = stats})
  terminate(job, events, channel, stream, group, entry, 'finished', terminal,
    {'finish_reason', reason, 'stats', cmsgpack.pack(stats)}, withheld_events(withheld, n_stored))
end

-- Makes a dead letter of a job that has failed. Its keys live for at least `dead_ttl` ms, so that an operator can examine
-- and retry it. The stream `dead` has about `max_dead` entries at most. `workers` are the ids of the workers that died
-- with the job.
local function add_dead_letter(job, events, dead, id, reason, workers, dead_ttl, max_dead)
  redis.call('XADD', dead, 'MAXLEN', '~', max_dead, '*', 'job', id, 'reason', reason, 'workers', workers)
  local life = math.max(whole_number(redis.call('HGET', job, 'ttl_ms')) or 0, tonumber(dead_ttl))
  redis.call('PEXPIRE', job, life)
  redis.call('PEXPIRE', events, life)
end

local function has_ended(status)
  return status == 'finished' or status == 'failed'
end

local function is_open(status)
  return status == 'queued' or status == 'running'
end

-- Returns whether this entry was made for the job. The id alone does not prove it: entries of two streams have the same
-- id when they were added in the same millisecond. An error if another client has damaged the priority.
local function is_entry_of_job(own_entry, priority, stream, entry)
  if own_entry ~= entry then
    return false
  end
  if priority ~= 'interactive' and priority ~= 'bulk' then
    error('the field priority is damaged')
  end
  return string.sub(stream, -#priority - 1) == ':' .. priority
end

-- Returns whether the attempt `number` of `own_worker` is the newest attempt of a job, so that this worker may write.
-- `attempt` and `worker` are fields of the job's hash. The worker is compared too: if a failover of Redis lost the start of
-- an attempt, two workers may have the same number.
local function is_newest_attempt(attempt, worker, number, own_worker)
  return attempt == number and worker == own_worker
end

local function deaths_of(job)
  local deaths = {}
  local stored = redis.pcall('HGET', job, 'deaths')
  for death in string.gmatch(type(stored) == 'string' and stored or '', '%S+') do
    deaths[#deaths + 1] = death
  end
  return deaths
end

-- Records a death of the worker of this attempt against the job. It may be removed again: the worker of a job that was moved
-- is usually alive. Returns all recorded deaths of the job.
local function add_death(job, attempt, worker)
  local deaths = deaths_of(job)
  deaths[#deaths + 1] = attempt .. '=' .. worker
  redis.call('HSET', job, 'crashes', #deaths, 'deaths', table.concat(deaths, ' '))
  return deaths
end

-- Removes the recorded death of this attempt. The caller is the worker of this attempt, which was only paused or
-- disconnected. If `worker` is given, only a death of this worker is removed: after a failover of Redis, two workers
-- may have the same attempt number. This works also when Redis is full, unless the job has ended. The function ignores
-- errors of Redis: another client may have changed the type of the job's keys.
local function remove_death(job, attempt, worker)
  local deaths, remaining = deaths_of(job), {}
  for _, death in ipairs(deaths) do
    local number, dead_worker = string.match(death, '^([^=]*)=(.*)')
    if number ~= tostring(attempt) or (worker and worker ~= dead_worker) then
      remaining[#remaining + 1] = death
    end
  end
  if #remaining < #deaths then
    if redis.pcall('TTL', job) == -1 then -- the job has not ended
      pcall(allow_writes_when_full, job)
    end
    redis.pcall('HSET', job, 'crashes', #remaining, 'deaths', table.concat(remaining, ' '))
  end
end

-- Makes a job claimable again, because its worker will not finish it. The attempt number rises, so that the worker can
-- no longer write.
local function requeue_job(job)
  redis.call('HINCRBY', job, 'attempt', 1)
  redis.call('HSET', job, 'status', 'queued')
  redis.call('HDEL', job, 'at_risk')
end

-- Returns whether the queue is paused. `key` is any key of the partition. The settings of the partition have the field
-- `mode`: 'paused' or 'draining'. It is absent while the queue is open.
local function is_paused(key)
  return redis.pcall('HGET', string.match(key, '^(.-}:)') .. 'config', 'mode') == 'paused'
end

-- Requeues an entry: the next worker that looks for requeued entries takes it at once.
local function requeue_entry(stream, group, entry)
  redis.call('XCLAIM', stream, group, WAITING, 0, entry, 'IDLE', REQUEUED_IDLE_MS, 'JUSTID')
end

-- Calls `release(stream, entry)` for up to `limit` pending entries of a consumer, except those that are requeued already.
-- `release` returns whether it has released the job of the entry. Returns the number of released jobs. A damaged job does
-- not affect the others.
local function release_entries(stream, group, consumer, limit, release)
  local pending, n_released = redis.pcall('XPENDING', stream, group, '-', '+', limit, consumer), 0
  for _, item in ipairs(array_or_empty(pending)) do
    local entry, _, idle_ms = unpack(item)
    if idle_ms < REQUEUED_IDLE_MS / 2 and for_one_job(release, stream, entry) == true then
      n_released = n_released + 1
    end
  end
  return n_released
end
