-- Stores and publishes what running jobs generated since the last flush, renews their leases, and tells which of
-- them the worker should let go. One call for all jobs of a worker in one partition.
--
-- KEYS[3i+1] job      hash of job i         KEYS[3i+2] events   stream of its events
-- KEYS[3i+3] stream   job stream it was claimed from
-- ARGV[1] consumer group   ARGV[2] worker id   ARGV[3] '1': renew the leases
-- ARGV[4] msgpack, an array with seven values for each job (one argument is cheaper to send than seven for each):
-- attempt, entry id, channel, offset of the first token, number of tokens, the `tokens` event ('' for nothing new), and
-- whether it is published too (jobs with stream=false are only stored)
--
-- An event is stored only when it goes on exactly where the stored tokens end; the worker reads the stored length
-- from the reply and sends the rest again. So a repeated call stores nothing twice.
--
-- Returns four values for each job: code, tokens stored now, listeners on its channel, and what Redis said when it took
-- no write ('' when it did, or had none to take): that is for the worker to try again later, with nothing changed.
-- Codes: 'ok' | 'cancel' somebody asked to cancel | 'lost' a newer attempt exists, or the job has ended or is gone

local group, worker, renew = ARGV[1], ARGV[2], ARGV[3] == '1'
local values = cmsgpack.unpack(ARGV[4])

-- Returns the tokens stored now, and what Redis said against it. Whatever lies in the way stays this job's matter.
local function store(job, events, stored, count, payload)
  local added = redis.pcall('XADD', events, '*', 'e', payload)
  if type(added) ~= 'table' then
    redis.call('HSET', job, 'generated', stored + count)
    return stored + count, ''
  end
  if string.find(added.err, 'WRONGTYPE', 1, true) or string.find(added.err, 'exhausted', 1, true) then
    -- Somebody wrote over the events. The worker has them all: it sends them again from the first one.
    redis.call('DEL', events)
    redis.call('HSET', job, 'generated', 0)
    return 0, ''
  end
  return stored, added.err
end

local function flush(job, events, attempt, channel, offset, count, payload, is_published)
  local state = redis.pcall('HMGET', job, 'status', 'attempt', 'generated', 'cancel', 'worker')
  -- The worker too: when a failover lost the start of an attempt, another worker may have got the same number.
  if state.err or state[1] ~= 'running' or tonumber(state[2]) ~= attempt or state[5] ~= worker then
    forgive(job, attempt, worker)
    return 'lost', tonumber(not state.err and state[3] or '0') or 0, 0, ''
  end
  local before = tonumber(state[3] or '0') or 0
  local stored, refusal, listeners = before, '', nil
  if payload ~= '' and offset == before then
    stored, refusal = store(job, events, before, count, payload)
    if is_published and refusal == '' and stored == before + count then
      listeners = redis.call('PUBLISH', channel, payload)
    end
  end
  listeners = listeners or redis.call('PUBSUB', 'NUMSUB', channel)[2]
  return state[4] and 'cancel' or 'ok', stored, listeners, refusal
end

local reply = {}
for i = 0, #KEYS / 3 - 1 do
  local v = 7 * i
  reply[4 * i + 1], reply[4 * i + 2], reply[4 * i + 3], reply[4 * i + 4] = flush(KEYS[3 * i + 1], KEYS[3 * i + 2],
    values[v + 1], values[v + 3], values[v + 4], values[v + 5], values[v + 6], values[v + 7])
  local refusal = reply[4 * i + 4]
  if string.find(refusal, 'READONLY', 1, true) or string.find(refusal, 'NOREPLICAS', 1, true) then
    return {err = 'READONLY ' .. refusal} -- not the master any more: the worker has to look for the new one
  end
end
-- After the events: once a script has written anything, a full Redis refuses it no more, and XCLAIM it never refuses.
if renew then
  for i = 0, #KEYS / 3 - 1 do
    if reply[4 * i + 1] ~= 'lost' then
      redis.pcall('XCLAIM', KEYS[3 * i + 3], group, worker, 0, values[7 * i + 2], 'JUSTID')
    end
  end
end
return reply
