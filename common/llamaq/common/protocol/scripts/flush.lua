-- Stores and publishes the tokens that running jobs generated since the last flush, and renews the leases of the jobs.
-- One call flushes all jobs of a worker in one partition.
--
-- Keys of job i, where i counts from 0:
-- KEYS[3i+1]  job      hash of the job
-- KEYS[3i+2]  events   stream of the job's events
-- KEYS[3i+3]  stream   job stream that the job was claimed from
--
-- ARGV[1]  group    consumer group of the job streams
-- ARGV[2]  worker   id of the worker
-- ARGV[3]  renew    '1': renew the leases; '0': do not
-- ARGV[4]  values   msgpack of an array with seven values for each job. One argument is cheaper to send than many.
--     1  attempt       number of the worker's attempt
--     2  entry         id of the job's entry
--     3  channel       channel of the job's events
--     4  offset        number of tokens of the job before the new ones
--     5  count         number of new tokens
--     6  payload       msgpack of the event `tokens` with the new tokens; '': there are none
--     7  is_published  whether to publish the event; with stream=false it is only stored
--
-- Returns an array with four values for each job:
--     1  code       'ok'      the worker may continue
--                   'cancel'  the worker should end the job: a client has called cancel
--                   'lost'    the worker should release the job: a newer attempt exists, or the job has ended
--     2  stored     number of tokens that Redis has now
--     3  listeners  number of subscribers of the channel
--     4  refusal    error text of Redis when it refused to store the event; '' otherwise. The worker tries again later.
--
-- An event is stored only if its offset equals the number of stored tokens. Otherwise the worker
-- sends the tokens from offset `stored` again. A repeated call therefore stores nothing twice.

local group, worker, renew = ARGV[1], ARGV[2], ARGV[3] == '1'
local values = cmsgpack.unpack(ARGV[4])

-- Stores one event. Returns the number of stored tokens and the error text of Redis. An error affects only this job.
local function store(job, events, stored, count, payload)
  local added = redis.pcall('XADD', events, '*', 'e', payload)
  if type(added) ~= 'table' then
    redis.call('HSET', job, 'generated', stored + count)
    return stored + count, ''
  end
  if string.find(added.err, 'WRONGTYPE', 1, true) or string.find(added.err, 'exhausted', 1, true) then
    -- Another client overwrote the key. The worker has all tokens, and sends them again from the first token.
    redis.call('DEL', events)
    redis.call('HSET', job, 'generated', 0)
    return 0, ''
  end
  return stored, added.err
end

local function flush(job, events, attempt, channel, offset, count, payload, is_published)
  local state = redis.pcall('HMGET', job, 'status', 'attempt', 'generated', 'cancel', 'worker')
  -- Compare the worker too: if a failover lost the start of an attempt, two workers may have the same number.
  if state.err or state[1] ~= 'running' or tonumber(state[2]) ~= attempt or state[5] ~= worker then
    remove_death(job, attempt, worker)
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
    return {err = 'READONLY ' .. refusal} -- this server is no longer the master: the worker reconnects
  end
end
-- Renew after the events are stored. A full Redis checks its memory limit only at the first write of a script, and
-- never refuses XCLAIM. If XCLAIM were the first write, Redis would store the events although it is full.
if renew then
  for i = 0, #KEYS / 3 - 1 do
    if reply[4 * i + 1] ~= 'lost' then
      redis.pcall('XCLAIM', KEYS[3 * i + 3], group, worker, 0, values[7 * i + 2], 'JUSTID')
    end
  end
end
return reply
