-- Stores and publishes what running jobs generated since the last flush, renews their leases, and tells which of
-- them the worker should let go. One call for all jobs of a worker in one partition.
--
-- KEYS[3i+1] job      hash of job i         KEYS[3i+2] events   stream of its events
-- KEYS[3i+3] stream   job stream it was claimed from
-- ARGV[1] consumer group   ARGV[2] worker id   ARGV[3] '1': renew the leases
-- ARGV[4] msgpack, an array with six values for each job (one argument is cheaper to send than six for each): attempt,
-- entry id, channel, offset of the first token, number of tokens, and the `tokens` event ('' for nothing new)
--
-- An event is stored only when it goes on exactly where the stored tokens end; the worker reads the stored length
-- from the reply and sends the rest again. So a repeated call stores nothing twice.
--
-- Returns three values for each job: code, tokens stored now, listeners on its channel.
-- Codes: 'ok' | 'cancel' somebody asked to cancel | 'lost' a newer attempt exists, or the job has ended or is gone

local group, worker, renew = ARGV[1], ARGV[2], ARGV[3] == '1'
local values = cmsgpack.unpack(ARGV[4])
local reply = {}
for i = 0, #KEYS / 3 - 1 do
  local job, events, stream = KEYS[3 * i + 1], KEYS[3 * i + 2], KEYS[3 * i + 3]
  local attempt, entry, channel = values[6 * i + 1], values[6 * i + 2], values[6 * i + 3]
  local offset, count, payload = values[6 * i + 4], values[6 * i + 5], values[6 * i + 6]
  local state = redis.call('HMGET', job, 'status', 'attempt', 'generated', 'cancel')
  local code, stored, listeners = 'ok', tonumber(state[3] or '0'), 0
  if state[1] ~= 'running' or tonumber(state[2]) ~= attempt then
    code = 'lost'
  else
    if payload ~= '' and offset == stored then
      stored = redis.call('HINCRBY', job, 'generated', count)
      listeners = emit(events, channel, payload)
    else
      listeners = redis.call('PUBSUB', 'NUMSUB', channel)[2]
    end
    if renew then
      redis.pcall('XCLAIM', stream, group, worker, 0, entry, 'JUSTID')
    end
    if state[4] then
      code = 'cancel'
    end
  end
  reply[3 * i + 1], reply[3 * i + 2], reply[3 * i + 3] = code, stored, listeners
end
return reply
