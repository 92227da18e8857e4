-- Stores and publishes the tokens that jobs generated since the last flush, records which jobs have a slot, and renews the
-- leases of the jobs. One call flushes all jobs of a worker in one partition.
--
-- A job runs while it has a slot. A preempted job waits again: it becomes 'queued' when all its tokens are stored, so that
-- another worker may continue it.
--
-- Keys of job i, where i counts from 0:
-- KEYS[3i+1]  job      hash of the job
-- KEYS[3i+2]  events   stream of the job's events
-- KEYS[3i+3]  stream   job stream that the job was read from
--
-- ARGV[1]  group     consumer group of the job streams
-- ARGV[2]  worker    id of the worker
-- ARGV[3]  lease_ms  how long the worker keeps a job without a renewal, in ms
-- ARGV[4]  renew     '1': renew the leases; '0': do not
-- ARGV[5]  values    msgpack of an array with 14 values for each job. One argument is cheaper to send than many.
--     1  attempt       number of the worker's attempt
--     2  entry         id of the job's entry
--     3  channel       channel of the job's events
--     4  offset        number of tokens of the job before the new ones
--     5  count         number of new tokens
--     6  payload       msgpack of the event `tokens` with the new tokens; '': there are none
--     7  is_published  whether to publish the event; with stream=false it is only stored
--     8  has_started   whether the job has a slot, or had one in this attempt. The first such call publishes `started`
--     9  has_slot      whether the job has a slot now
--     10 slot_ms       time in ms that the job has had a slot, over all attempts
--     11 token_times   the times of all tokens so far, for the metrics
--     12 progress      array with the msgpack of each event `prompt_progress` since the last flush. They are published
--                      before the tokens, and not stored
--     13 withheld      msgpack of an event `tokens` with the text that is withheld after the new tokens; '': there is none
--     14 is_watched    whether to count the subscribers
--
-- Returns an array with four values for each job:
--     1  code       'ok'      the worker may continue
--                   'cancel'  the worker should end the job: a client has called cancel
--                   'lost'    the worker should release the job: a newer attempt exists, or the job has ended
--     2  stored     number of tokens that Redis has now
--     3  listeners  number of subscribers of the channel; 0 if they are not counted
--     4  refusal    error text of Redis when it refused to store the event; '' otherwise. The worker tries again later.
--
-- An event is stored only if its offset equals the number of stored tokens. Otherwise the worker
-- sends the tokens from offset `stored` again. A repeated call therefore stores nothing twice.
--
-- A full Redis refuses the tokens of all jobs. The script still records which jobs have a slot.

local group, worker, lease_ms, renew = ARGV[1], ARGV[2], ARGV[3], ARGV[4] == '1'
local values = cmsgpack.unpack(ARGV[5])

-- Appends an event. Returns the error text of Redis, or ''. If another client overwrote the key, the worker must send all
-- tokens again.
local function append(job, events, payload)
  local added = redis.pcall('XADD', events, '*', 'e', payload)
  if type(added) ~= 'table' then
    return ''
  end
  if string.find(added.err, 'WRONGTYPE', 1, true) or string.find(added.err, 'exhausted', 1, true) then
    redis.call('DEL', events)
    redis.call('HSET', job, 'generated', 0)
    return 'overwritten'
  end
  return added.err
end

-- Renews the lease of an entry, so that it belongs to `consumer`. Returns the error text of Redis, or ''. An operator may
-- have deleted the job stream, with its consumer group. Then there is no lease to renew, and the job continues.
local function keep_lease(stream, consumer, entry)
  local outcome = for_one_job(renew_lease, stream, group, consumer, entry, lease_ms)
  return outcome and outcome[2] or ''
end

-- Starts an attempt that has, or had, its first slot. Returns the error text of Redis, or ''.
local function start(job, events, attempt, channel)
  local set = redis.pcall('HSET', job, 'started_attempt', attempt)
  if type(set) == 'table' then
    return set.err
  end
  redis.call('HSETNX', job, 'started_ms', now_ms())
  -- An error here must not stop the flush: another client may have overwritten the sorted set of the deadlines.
  pcall(set_next_deadline, job, next_deadline_ms('running', true, 0, redis.call('HGET', job, 'deadline_ms')))
  local started = cmsgpack.pack({type = 'started', attempt = attempt, worker = worker})
  local refusal = append(job, events, started)
  if refusal == 'overwritten' then
    refusal = append(job, events, started)
  end
  redis.call('PUBLISH', channel, started)
  return refusal
end

-- Records that a job has a slot, or that it waits for another slot. Returns the error text of Redis, or ''.
local function set_status(job, stream, entry, attempt, status, slot_ms)
  local fields = {'status', status, 'slot_ms', slot_ms, 'started_attempt', attempt}
  if status == 'queued' then
    fields[7], fields[8] = 'claimed_ms', now_ms()
  end
  local set = redis.pcall('HSET', job, unpack(fields))
  if type(set) == 'table' then
    return set.err
  end
  keep_lease(stream, status == 'running' and worker or WAITING, entry)
  return ''
end

-- Records that an attempt `starts`, and that its job `runs` from now on. Returns the error text of Redis, or ''.
local function record_slot(job, events, stream, attempt, entry, channel, starts, runs, slot_ms)
  local refusal = starts and start(job, events, attempt, channel) or ''
  if runs and refusal == '' then
    refusal = set_status(job, stream, entry, attempt, 'running', slot_ms)
  end
  return refusal
end

-- Writes that a full Redis must accept. They come after it has refused the tokens of all jobs, because it checks its
-- memory limit only at the first write of a script.
local late = {}

-- Flushes one job. Returns the four values for the job, and the consumer of its entry.
local function flush(job, events, stream, attempt, entry, channel, offset, count, payload, is_published, has_started,
                     has_slot, slot_ms, token_times, progress, withheld, is_watched)
  local status, newest, last_worker, started_attempt, generated, cancel = fields_if_hash(job,
    'status', 'attempt', 'worker', 'started_attempt', 'generated', 'cancel')
  if not is_open(status) or not is_newest_attempt(tonumber(newest), last_worker, attempt, worker) then
    late[#late + 1] = function()
      remove_death(job, attempt, worker)
    end
    return 'lost', whole_number(generated) or 0, 0, ''
  end
  local starts, runs = has_started and not was_started(newest, started_attempt), has_slot and status == 'queued'
  local refusal = record_slot(job, events, stream, attempt, entry, channel, starts, runs, slot_ms)
  if starts then
    generated = redis.call('HGET', job, 'generated')
  end
  if runs and refusal == '' then
    status = 'running'
  elseif is_full(refusal) then
    late[#late + 1] = function()
      allow_writes_when_full(job) -- otherwise another worker would take the job, because it would count as waiting
      record_slot(job, events, stream, attempt, entry, channel, starts, runs, slot_ms)
    end
  end
  for _, event in ipairs(progress) do
    redis.call('PUBLISH', channel, event)
  end
  local stored = whole_number(generated) or 0
  if payload ~= '' and offset == stored and refusal == '' then
    refusal = append(job, events, payload)
    if refusal == 'overwritten' then
      stored, refusal = 0, ''
    elseif refusal == '' then
      stored = stored + count
      redis.call('HSET', job, 'generated', stored, 'slot_ms', slot_ms, 'token_times', token_times, 'withheld', withheld)
      if is_published then
        redis.call('PUBLISH', channel, payload)
      end
    end
  end
  if not has_slot and status == 'running' and refusal == '' and stored == offset + count then
    refusal = set_status(job, stream, entry, attempt, 'queued', slot_ms)
    status = refusal == '' and 'queued' or status
  end
  -- The reply to PUBLISH also counts the subscribers of patterns, such as an operator.
  local listeners = is_watched and redis.call('PUBSUB', 'NUMSUB', channel)[2] or 0
  local consumer = (has_slot or status == 'running') and worker or WAITING
  return cancel and 'cancel' or 'ok', stored, listeners, refusal, consumer
end

local reply, consumers = {}, {}
for i = 0, #KEYS / 3 - 1 do
  local job, events, stream = unpack(KEYS, 3 * i + 1, 3 * i + 3)
  local code, stored, listeners, refusal, consumer = flush(
    job, events, stream, unpack(values, 14 * i + 1, 14 * i + 14))
  if is_demoted(refusal) then
    return {err = 'READONLY ' .. refusal} -- this server is no longer the master: the worker reconnects
  end
  reply[4 * i + 1], reply[4 * i + 2], reply[4 * i + 3], reply[4 * i + 4] = code, stored, listeners, refusal
  consumers[i] = consumer
end
for _, write in ipairs(late) do
  write()
end
-- Renew after the events are stored. A full Redis checks its memory limit only at the first write of a script, and
-- never refuses XCLAIM. If XCLAIM were the first write, a full Redis would store the events.
if renew then
  for i = 0, #KEYS / 3 - 1 do
    local code, stream, entry = reply[4 * i + 1], KEYS[3 * i + 3], values[14 * i + 2]
    local refusal = code ~= 'lost' and keep_lease(stream, consumers[i], entry) or ''
    if is_demoted(refusal) then
      return {err = 'READONLY ' .. refusal}
    end
  end
end
return reply
